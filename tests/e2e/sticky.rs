//! Sticky events: whoever joins a room gets all of ours that are alive, whichever way it joined.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    fake_remote::{
        record::Record,
        server::{FakeServer, Mode},
    },
    rig::{Rig, client::RoomOptions, store::As, traffic::Traffic},
};

/// How soon a joiner that is ready has to have them all.
const SOON: Duration = Duration::from_secs(1);

/// A room with a past, which only our own server has seen.
struct StickyRoom {
    id: String,
    /// Sticky, ours, and to be sent to whoever joins. In order.
    living: Vec<String>,
    /// Once sticky: expired, redacted, and of an erased user.
    dead: Vec<String>,
}

impl StickyRoom {
    async fn create(rig: &Rig, history_visibility: &'static str) -> Result<Self> {
        let options = RoomOptions {
            history_visibility,
            ..RoomOptions::default()
        };
        let id = rig.alice.create_room(options).await?;
        let erin = rig.hs1.register(&format!("erin{}", rig.next_number())).await?;
        erin.join(&id, &rig.hs1.name).await?;
        let expiring = rig.alice.send_sticky(&id, "expires", 1500).await?;
        let expired_at = Instant::now() + Duration::from_millis(1500);
        let erased = erin.send_sticky(&id, "erased", 600_000).await?;
        let redacted = rig.alice.send_sticky(&id, "redacted", 600_000).await?;
        rig.alice.redact(&id, &redacted).await?;
        erin.erase().await?;
        let mut living = Vec::new();
        for n in 0..120 {
            living.push(rig.alice.send_sticky(&id, &format!("sticky {n}"), 600_000).await?);
            if n % 2 == 0 {
                rig.alice.send(&id, &format!("plain {n}")).await?;
            }
        }
        tokio::time::sleep_until(expired_at.into()).await;
        Ok(Self {
            id,
            living,
            dead: vec![expiring, erased, redacted],
        })
    }

    fn number(&self, event_id: &str) -> Option<usize> {
        self.living.iter().position(|living| living == event_id)
    }

    /// Checks what a joiner was sent: all the living and none of the dead, in order, before anything else of the room,
    /// and in transactions as they should be.
    fn check(&self, record: &Record) -> Result<()> {
        for event in &self.dead {
            ensure!(
                !record.was_sent(event),
                "{event} was sent, though expired, redacted or erased"
            );
        }
        let accepted = record.accepted(&self.id);
        let order: Vec<_> = accepted.iter().map(|id| self.number(id)).collect();
        let right: Vec<_> = (0..self.living.len()).map(Some).collect();
        ensure!(
            order.starts_with(&right),
            "the sticky events came out of order, more than once, or after another event of the room: {order:?}",
        );
        for transaction in record.transactions_of(&self.id) {
            if transaction.pdus.iter().any(|pdu| self.living.contains(&pdu.event_id)) {
                ensure!(transaction.edus == 0, "{} EDUs beside sticky events", transaction.edus);
                ensure!(
                    transaction.pdus.len() <= 50,
                    "{} PDUs in a transaction",
                    transaction.pdus.len()
                );
            }
        }
        record.check()
    }

    /// A fake server joins and has them all within a second of its being ready.
    async fn fake_joins(&self, rig: &Rig) -> Result<()> {
        let fake = rig.fake()?;
        let ready = fake.join(&rig.hs1.resident, &self.id).await?;
        fake.record.wait_for(&self.living, Duration::from_secs(15)).await?;
        let took = took(&fake.record, &self.living, ready)?;
        self.check(&fake.record)?;
        ensure!(fake.record.overlaps() == 0, "two transactions were in flight at once");
        ensure!(
            took <= SOON,
            "the sticky events took {took:?} from the joiner's readiness"
        );
        Ok(())
    }

    /// The real server joins: it is sent them within a second of its being ready, and holds all of them within a
    /// minute, as what they are.
    async fn real_server_joins(&self, rig: &Rig) -> Result<()> {
        rig.bob.join(&self.id, &rig.hs1.name).await?;
        let joined = Instant::now();
        let held = rig
            .hs2
            .store
            .wait_for(&self.living, As::Sticky, Duration::from_mins(1))
            .await;
        if let Err(error) = held {
            let lacks = rig.hs2.store.lacks(&self.living, As::Sticky).await?;
            let numbers: Vec<_> = lacks.iter().map(|id| self.number(id)).collect();
            return Err(error.context(format!("the real joiner lacks {numbers:?}")));
        }
        eprintln!("  the real joiner held all after {:?}", joined.elapsed());
        rig.gate.record().wait_for(&self.living, Duration::from_secs(5)).await?;
        took(rig.gate.record(), &self.living, joined)?;
        let first = rig
            .gate
            .record()
            .all_accepted_at(&self.living[..1])
            .context("just accepted")?;
        let first = first.saturating_duration_since(joined);
        self.check(rig.gate.record())?;
        ensure!(first <= SOON, "the first sticky event took {first:?} from the join");
        for (n, event) in self.living.iter().enumerate() {
            let content = rig.hs2.store.content(event).await?;
            ensure!(
                content["body"] == format!("sticky {n}"),
                "{event} is held with the content {content}"
            );
        }
        Ok(())
    }
}

fn took(record: &Record, events: &[String], since: Instant) -> Result<Duration> {
    let took = record
        .all_accepted_at(events)
        .context("not all accepted")?
        .saturating_duration_since(since);
    eprintln!(
        "  {} sticky events were accepted {took:?} after the joiner was ready",
        events.len()
    );
    Ok(took)
}

pub async fn all_that_live_reach_a_new_server(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = StickyRoom::create(rig, "shared").await?;
    room.fake_joins(rig).await?;
    room.real_server_joins(rig).await?;
    burdock.stop().await
}

pub async fn so_they_do_under_joined_visibility_and_with_live_traffic(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = StickyRoom::create(rig, "joined").await?;
    let traffic = Traffic::start(&rig.alice, &room.id, Duration::from_millis(100));
    room.fake_joins(rig).await?;
    room.real_server_joins(rig).await?;
    traffic.stop().await?;
    rig.newest_message_arrives(&room.id, Duration::from_secs(30)).await?;
    burdock.stop().await
}

/// A room that Alice and Bob are in, with sticky events of Alice's, and one of Bob's.
async fn room_of_two(rig: &Rig, count: usize) -> Result<(String, Vec<String>, String)> {
    let room = rig.shared_room(RoomOptions::default()).await?;
    let ours = rig.alice.send_many_sticky(&room, count, "sticky").await?;
    rig.hs2
        .store
        .wait_for(&ours, As::Sticky, Duration::from_secs(20))
        .await?;
    let theirs = rig.bob.send_sticky(&room, "not ours", 600_000).await?;
    rig.hs1
        .store
        .wait_for(std::slice::from_ref(&theirs), As::Sticky, Duration::from_secs(20))
        .await?;
    Ok((room, ours, theirs))
}

pub async fn a_server_that_joined_through_another_gets_them(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let (room, ours, theirs) = room_of_two(rig, 60).await?;
    let fake = rig.fake()?;
    let ready = fake.join(&rig.hs2.resident, &room).await?;
    // No event follows that could be a trigger.
    fake.record.wait_for(&ours, Duration::from_secs(15)).await?;
    took(&fake.record, &ours, ready)?;
    fake.record.check()?;
    let by_us = fake
        .record
        .transactions()
        .into_iter()
        .filter(|transaction| transaction.origin == rig.hs1.name);
    let pdus: Vec<_> = by_us
        .flat_map(|transaction| transaction.pdus)
        .map(|pdu| pdu.event_id)
        .collect();
    ensure!(!pdus.contains(&theirs), "we sent a sticky event that is not ours");
    ensure!(pdus == ours, "the sticky events came out of order, or others with them");
    burdock.stop().await
}

pub async fn one_made_between_make_join_and_send_join_reaches_the_joiner(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = rig.alice.create_room(RoomOptions::default()).await?;
    for early in [false, true] {
        let mut events = Vec::new();
        let fake = rig.fake()?;
        if early {
            events.push(rig.alice.send_sticky(&room, "before make_join", 600_000).await?);
        }
        let join = fake.make_join(&rig.hs1.resident, &room).await?;
        events.push(rig.alice.send_sticky(&room, "between", 600_000).await?);
        join.send().await?;
        fake.finish_joining(&room);
        fake.record.wait_for(&events, Duration::from_secs(5)).await?;
        fake.record.check()?;
    }
    burdock.stop().await
}

pub async fn those_made_while_servers_join_reach_them(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = rig.alice.create_room(RoomOptions::default()).await?;
    let alice = rig.alice.clone();
    let talk = async { alice.send_many_sticky(&room, 100, "sticky").await };
    let (sent, fakes) = tokio::try_join!(talk, rig.joined_fakes(16, &room))?;
    for fake in &fakes {
        fake.record.wait_for(&sent, Duration::from_secs(15)).await?;
        fake.record.check()?;
    }
    burdock.stop().await
}

/// A fake server whose join is accepted but which has not dealt with that yet.
async fn unready_joiner(rig: &Rig, room: &str) -> Result<Arc<FakeServer>> {
    let fake = rig.fake()?;
    fake.make_join(&rig.hs1.resident, room).await?.send().await?;
    Ok(fake)
}

pub async fn a_joiner_that_is_not_ready_is_waited_for(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = rig.alice.create_room(RoomOptions::default()).await?;
    let events = rig.alice.send_many_sticky(&room, 60, "sticky").await?;
    let fake = unready_joiner(rig, &room).await?;
    tokio::time::sleep(Duration::from_millis(1200)).await;
    ensure!(fake.asked_for_events() > 0, "the joiner was not asked for its join");
    ensure!(
        fake.record.transactions_of(&room).is_empty(),
        "events were pushed that the joiner could not take"
    );
    let ready = fake.finish_joining(&room);
    fake.record.wait_for(&events, Duration::from_secs(5)).await?;
    took(&fake.record, &events, ready)?;
    fake.record.check()?;
    burdock.stop().await
}

pub async fn those_that_an_answer_leaves_out_are_sent_again(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = rig.alice.create_room(RoomOptions::default()).await?;
    let events = rig.alice.send_many_sticky(&room, 60, "sticky").await?;
    let fake = rig.fake()?;
    fake.set_mode(Mode::Unlisted { next: 2 });
    fake.join(&rig.hs1.resident, &room).await?;
    fake.record.wait_for(&events, Duration::from_secs(30)).await?;
    fake.record.check()?; // also that no id was used for two bodies
    burdock.stop().await
}

pub async fn a_server_that_left_again_gets_none(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = rig.alice.create_room(RoomOptions::default()).await?;
    rig.alice.send_many_sticky(&room, 10, "sticky").await?;
    let fake = unready_joiner(rig, &room).await?;
    fake.leave(&rig.hs1.resident, &room).await?;
    fake.finish_joining(&room);
    tokio::time::sleep(Duration::from_secs(5)).await;
    ensure!(
        fake.record.transactions_of(&room).is_empty(),
        "a server that is not in the room was sent its events"
    );
    burdock.stop().await
}

pub async fn a_join_while_we_were_away_is_found(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = rig.alice.create_room(RoomOptions::default()).await?;
    let events = rig.alice.send_many_sticky(&room, 60, "sticky").await?;
    burdock.stop().await?;
    let fake = rig.joined_fakes(1, &room).await?.remove(0);
    let burdock = rig.burdock().await?;
    fake.record.wait_for(&events, Duration::from_secs(10)).await?;
    fake.record.check()?;
    burdock.stop().await
}
