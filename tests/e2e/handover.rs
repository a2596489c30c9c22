//! Synapse's own sender and Burdock take over from one another in the middle of a backlog.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::{
    fake_remote::server::Mode,
    rig::{Rig, client::RoomOptions, sender::Kind, wait_until},
};

/// So slow that there is time to step in between two transactions.
const SLOW: Mode = Mode::Slow(Duration::from_millis(1500));

pub async fn synapses_own_sender_takes_over_in_mid_backlog(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = rig.alice.create_room(RoomOptions::default()).await?;
    let sticky = rig.alice.send_many_sticky(&room, 180, "sticky").await?;
    let fake = rig.fake()?;
    fake.set_mode(SLOW);
    fake.join(&rig.hs1.resident, &room).await?;
    wait_until(
        "the first part of the backlog is accepted",
        Duration::from_secs(20),
        async || Ok(!fake.record.accepted(&room).is_empty()),
    )
    .await?;
    burdock.stop().await?;
    let done = fake.record.accepted(&room).len();
    ensure!(done < sticky.len(), "the backlog was drained too soon to see anything");

    let python = rig.sender(Kind::Python, "fed1", &["fed1"]).await?;
    fake.set_mode(Mode::Accept);
    // It begins with nothing after its start until an event comes.
    let event = rig.alice.send(&room, "wake up").await?;
    fake.record.wait_for(&[event], Duration::from_secs(20)).await?;
    // It looks for destinations with a backlog once a minute.
    fake.record.wait_for(&sticky, Duration::from_secs(90)).await?;
    fake.record.check()?;
    python.stop().await
}

pub async fn burdock_takes_over_from_it_in_mid_backlog(rig: &Rig) -> Result<()> {
    let python = rig.sender(Kind::Python, "fed1", &["fed1"]).await?;
    let room = rig.alice.create_room(RoomOptions::default()).await?;
    let fake = rig.joined_fakes(1, &room).await?.remove(0);
    let event = rig.alice.send(&room, "hello").await?;
    fake.record.wait_for(&[event], Duration::from_secs(20)).await?;

    // It falls behind; a restarted sender catches up, and so marks the sticky events that it passes over as backlog.
    fake.set_mode(Mode::Down);
    let sticky = rig.alice.send_many_sticky(&room, 180, "sticky").await?;
    let newest = rig.alice.send_many(&room, 2, "plain").await?;
    python.stop().await?;
    fake.set_mode(SLOW);
    let python = rig.sender(Kind::Python, "fed1", &["fed1"]).await?;
    let other_room = rig.alice.create_room(RoomOptions::default()).await?;
    fake.join(&rig.hs1.resident, &other_room).await?;
    rig.alice.send(&other_room, "wake up").await?;
    wait_until(
        "a part of the backlog is accepted",
        Duration::from_mins(1),
        async || Ok(fake.record.all_accepted_at(&sticky[..1]).is_some()),
    )
    .await?;
    python.kill();
    ensure!(
        fake.record.all_accepted_at(&sticky).is_none(),
        "the backlog was drained too soon to see anything"
    );

    let burdock = rig.burdock().await?;
    fake.set_mode(Mode::Accept);
    fake.record.wait_for(&sticky, Duration::from_secs(20)).await?;
    fake.record.wait_for(&newest[1..], Duration::from_secs(20)).await?;
    fake.record.check()?;
    burdock.stop().await
}

/// With nothing in arrears: each goes on where the other stopped, with every event.
pub async fn they_take_turns_under_traffic(rig: &Rig) -> Result<()> {
    let room = rig.shared_room(RoomOptions::default()).await?;
    let fakes = rig.joined_fakes(3, &room).await?;
    let traffic = rig.traffic(&room);
    for kind in [Kind::Burdock, Kind::Python, Kind::Burdock] {
        let sender = rig.sender(kind, "fed1", &["fed1"]).await?;
        tokio::time::sleep(Duration::from_secs(3)).await;
        sender.stop().await?;
    }
    traffic.stop().await?;
    let burdock = rig.burdock().await?;
    // Not every event: what the Python sender had not sent when it stopped, it catches up by each room's newest.
    let newest = rig
        .hs1
        .store
        .messages(&room)
        .await?
        .pop()
        .into_iter()
        .collect::<Vec<_>>();
    for fake in &fakes {
        fake.record.wait_for(&newest, Duration::from_secs(30)).await?;
        fake.record.check()?;
    }
    burdock.stop().await
}
