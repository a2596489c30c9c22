//! Servers that are away for a while.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::{
    fake_remote::server::Mode,
    rig::{Rig, client::RoomOptions, store::As},
};

/// Longer than a destination may be behind before it has to catch up (10 s).
const LONG: Duration = Duration::from_secs(12);

/// Three rooms and 30 events, of which 5 are sticky and not their room's newest. Burdock is killed in between.
pub async fn a_server_that_was_away_gets_all_sticky_events_and_the_newest_of_each_room(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let never_reached = rig.fake()?;
    let mut rooms = Vec::new();
    for _ in 0..3 {
        let room = rig.shared_room(RoomOptions::default()).await?;
        let greeting = rig.alice.send(&room, "hello").await?;
        rig.hs2
            .store
            .wait_for(&[greeting], As::Event, Duration::from_secs(10))
            .await?;
        rooms.push(room);
    }
    for room in &rooms {
        never_reached.join(&rig.hs1.resident, room).await?;
    }
    ensure!(
        never_reached.record.transactions().is_empty(),
        "it has been reached already"
    );
    never_reached.set_mode(Mode::Down);
    rig.gate.shut();

    let mut sticky = Vec::new();
    let mut newest = vec![String::new(); rooms.len()];
    let mut burdock = Some(burdock);
    for n in 0..30 {
        let room = n % 3;
        let text = format!("while away {n}");
        newest[room] = if [4, 8, 9, 17, 22].contains(&n) {
            let event = rig.alice.send_sticky(&rooms[room], &text, 600_000).await?;
            sticky.push(event.clone());
            event
        } else {
            rig.alice.send(&rooms[room], &text).await?
        };
        match n {
            // In the middle of failing, and again after it has seen the rest only as a restarted process would.
            12 => burdock.take().context("runs")?.kill(),
            20 => burdock = Some(rig.burdock().await?),
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    let mut burdock = burdock.context("runs")?;
    tokio::time::sleep(LONG).await;
    burdock.check_running()?;
    for events in [&sticky, &newest] {
        ensure!(
            rig.hs2.store.lacks(events, As::Event).await?.len() == events.len(),
            "hs2 was not away"
        );
    }

    rig.gate.open();
    never_reached.set_mode(Mode::Accept);
    let within = Duration::from_secs(30);
    rig.hs2.store.wait_for(&sticky, As::Sticky, within).await?;
    rig.hs2.store.wait_for(&newest, As::Event, within).await?;
    never_reached.record.wait_for(&sticky, within).await?;
    never_reached.record.wait_for(&newest, within).await?;
    never_reached.record.check()?;
    rig.gate.record().check()?;
    burdock.stop().await
}

/// Away for less than the wait between two tries of one attempt (0.8 s at least): then it is sent everything.
pub async fn a_server_that_was_away_for_a_moment_gets_every_event(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = rig.shared_room(RoomOptions::default()).await?;
    let fake = rig.joined_fakes(1, &room).await?.remove(0);
    let before = rig.alice.send_many(&room, 3, "before").await?;
    fake.record.wait_for(&before, Duration::from_secs(10)).await?;
    fake.set_mode(Mode::Down);
    let mut meanwhile = vec![rig.alice.send(&room, "meanwhile").await?];
    tokio::time::sleep(Duration::from_millis(300)).await;
    fake.set_mode(Mode::Accept);
    meanwhile.extend(rig.alice.send_many(&room, 10, "after").await?);
    fake.record.wait_for(&meanwhile, Duration::from_secs(15)).await?;
    let mut all = before;
    all.extend(meanwhile);
    ensure!(
        fake.record.accepted(&room).ends_with(&all),
        "the events came out of order, or more than once"
    );
    fake.record.check()?;
    burdock.stop().await
}
