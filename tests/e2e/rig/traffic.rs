//! A room in which somebody talks all the time.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::client::User;

/// Messages, one after another, until it is stopped.
pub struct Traffic {
    stop: CancellationToken,
    task: JoinHandle<usize>,
}

impl Traffic {
    /// `user` sends a message to `room_id`, waits for `pause`, and so on. What fails is not sent again: what the room
    /// holds in the end is to be read from the homeserver.
    pub fn start(user: &User, room_id: &str, pause: Duration) -> Self {
        let stop = CancellationToken::new();
        let (user, room_id, stopped) = (user.clone(), room_id.to_owned(), stop.clone());
        let task = tokio::spawn(async move {
            let mut sent = 0;
            while !stopped.is_cancelled() {
                if user.send(&room_id, &format!("live {sent}")).await.is_ok() {
                    sent += 1;
                }
                tokio::time::sleep(pause).await;
            }
            sent
        });
        Self { stop, task }
    }

    /// Ends it. Fails if hardly a message was taken: then the case showed nothing.
    pub async fn stop(self) -> Result<usize> {
        self.stop.cancel();
        let sent = self.task.await?;
        ensure!(sent >= 5, "only {sent} messages were sent meanwhile");
        Ok(sent)
    }
}
