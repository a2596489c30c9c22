//! Several Burdocks share the destinations.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use crate::{
    fake_remote::server::FakeServer,
    rig::{Rig, client::RoomOptions, sender::Kind},
};

const ONE: &[&str] = &["fed1"];
const TWO: &[&str] = &["fed1", "fed2"];

/// The processes that sent to a server since then: what a transaction's id begins with is drawn once a process.
fn processes_since(fake: &FakeServer, since: Instant) -> BTreeSet<String> {
    let transactions = fake
        .record
        .transactions()
        .into_iter()
        .filter(|transaction| transaction.received > since);
    transactions
        .map(|transaction| transaction.id.split('-').next().unwrap_or_default().to_owned())
        .collect()
}

pub async fn the_set_changes_from_one_to_two_and_back_under_traffic(rig: &Rig) -> Result<()> {
    let room = rig.shared_room(RoomOptions::default()).await?;
    let fakes = rig.joined_fakes(12, &room).await?;
    let traffic = rig.traffic(&room);

    let alone = rig.sender(Kind::under_test(), "fed1", ONE).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    alone.stop().await?;

    // Seconds apart: the first must not move past what is the second's before that has begun.
    let first = rig.sender(Kind::under_test(), "fed1", TWO).await?;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let second = rig.sender(Kind::under_test(), "fed2", TWO).await?;
    let both_run = Instant::now();
    tokio::time::sleep(Duration::from_secs(4)).await;
    let mut shares: BTreeMap<String, usize> = BTreeMap::new();
    for fake in &fakes {
        let processes = processes_since(fake, both_run);
        ensure!(
            processes.len() == 1,
            "{} is sent to by {} processes",
            fake.name(),
            processes.len()
        );
        *shares.entry(processes.into_iter().collect()).or_default() += 1;
    }
    ensure!(
        shares.len() == 2,
        "the two instances do not share the destinations: {shares:?}"
    );
    first.stop().await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    second.stop().await?;

    let alone = rig.sender(Kind::under_test(), "fed1", ONE).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    traffic.stop().await?;
    rig.all_messages_arrive(&room, &fakes, Duration::from_secs(30)).await?;
    alone.stop().await
}
