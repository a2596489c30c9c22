//! The sender as a whole, in this process: on a copy of Synapse's database, a real Redis and servers of the tests' own.
//!
//! `homeserver` plays Synapse: it writes the rows that Synapse writes, and speaks on the channel. `remote` plays the other
//! servers. `running` is the sender between them. Nothing is waited for by time: each test waits for what must happen, and
//! what must not happen is looked for once something later has.

#[path = "../support/database.rs"]
mod database;
#[path = "../fake_remote/serve.rs"]
mod serve;
#[path = "../fake_remote/tls.rs"]
mod tls;

mod answers;
mod behind;
mod endings;
mod homeserver;
mod recipients;
mod remote;
mod replication;
mod running;
mod sticky;
mod tables;

use std::time::Duration;

/// How long what must happen may take. Far above what it takes, and below the minute after which the sender looks for
/// itself at what it should have been told.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns once `condition` holds.
async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let holds = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let held = tokio::time::timeout(PATIENCE, holds).await;
    assert!(held.is_ok(), "did not happen: {what}");
}
