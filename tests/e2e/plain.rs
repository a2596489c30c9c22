//! Ordinary events: who gets them, who does not, and who cannot hold up others.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::{
    fake_remote::server::Mode,
    rig::{Rig, client::RoomOptions, sender::Kind, store::As, wait_until},
};

/// Shows that the rig itself works: Synapse's own sender does this.
pub async fn synapses_own_sender_delivers(rig: &Rig) -> Result<()> {
    let sender = rig.sender(Kind::Python, "fed1", &["fed1"]).await?;
    let room = rig.shared_room(RoomOptions::default()).await?;
    let fake = rig.joined_fakes(1, &room).await?.remove(0);
    let event = rig.alice.send(&room, "hello").await?;
    rig.hs2
        .store
        .wait_for(std::slice::from_ref(&event), As::Event, Duration::from_secs(10))
        .await?;
    fake.record.wait_for(&[event], Duration::from_secs(10)).await?;
    rig.gate.record().check()?;
    fake.record.check()?;
    sender.stop().await
}

pub async fn an_event_arrives(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    for version in ["6", "10", "11", "12"] {
        let options = RoomOptions {
            version,
            ..RoomOptions::default()
        };
        let room = rig.shared_room(options).await?;
        rig.gate.record().set_room_version(&room, version.parse()?);
        // More than one event, as the first makes the connection.
        for text in ["hello", "Grüße: \u{2028}\u{7f}\u{0}\"\\/", "🌱"] {
            let event = rig.alice.send(&room, text).await?;
            rig.hs2
                .store
                .wait_for(std::slice::from_ref(&event), As::Event, Duration::from_secs(10))
                .await?;
            ensure!(
                rig.hs2.store.content(&event).await?["body"] == text,
                "{event} arrived with another text"
            );
        }
    }
    rig.gate.record().check()?;
    burdock.stop().await
}

/// Synapse keeps in memory how a destination fares, and forgets it only when it hears our row of `caches`.
pub async fn synapse_hears_how_a_server_fares(rig: &Rig) -> Result<()> {
    let admin = rig.hs1.register("admin").await?;
    rig.hs1.store.make_admin(&admin.id).await?;
    let burdock = rig.burdock().await?;
    let room = rig.shared_room(RoomOptions::default()).await?;
    let fake = rig.joined_fakes(1, &room).await?.remove(0);
    let event = rig.alice.send(&room, "hello").await?;
    fake.record.wait_for(&[event], Duration::from_secs(10)).await?;
    let interval = async || Ok::<_, anyhow::Error>(admin.destination(fake.name()).await?["retry_interval"].as_i64());
    // Its row comes with our next checkpoint.
    wait_until(
        "the main process knows that it is well",
        Duration::from_secs(10),
        async || Ok(interval().await.is_ok_and(|interval| interval == Some(0))),
    )
    .await?;

    fake.set_mode(Mode::Refuse(503));
    rig.alice.send(&room, "refused").await?;
    wait_until(
        "the main process knows of the back-off",
        Duration::from_secs(20),
        async || Ok(interval().await?.is_some_and(|interval| interval > 0)),
    )
    .await?;
    fake.set_mode(Mode::Accept);
    wait_until(
        "the main process knows of its end",
        Duration::from_secs(20),
        async || Ok(interval().await? == Some(0)),
    )
    .await?;
    burdock.stop().await
}

/// Synapse throws events of a room away when a hundred of them wait to be worked on, and fetches ten of them.
pub async fn many_that_piled_up_all_arrive(rig: &Rig) -> Result<()> {
    let room = rig.shared_room(RoomOptions::default()).await?;
    rig.alice.send_many(&room, 150, "piled up").await?;
    let burdock = rig.burdock().await?;
    rig.all_messages_arrive(&room, &[], Duration::from_mins(2)).await?;
    burdock.stop().await
}

/// A server that is out of the room after `depart` hears of that, and of nothing that comes later.
async fn nothing_arrives_after(rig: &Rig, room: &str) -> Result<()> {
    // Another server, to know when a later event has been sent to whom it concerns.
    let witness = rig.joined_fakes(1, room).await?.remove(0);
    let later = rig.alice.send_many(room, 3, "later").await?;
    witness.record.wait_for(&later, Duration::from_secs(10)).await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    for event in &later {
        ensure!(
            !rig.gate.record().was_sent(event),
            "{event} was sent to a server that had left the room"
        );
    }
    rig.gate.record().check()?;
    witness.record.check()
}

pub async fn a_ban_of_a_servers_last_user_arrives_there(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = rig.shared_room(RoomOptions::default()).await?;
    rig.alice.ban(&room, &rig.bob.id).await?;
    let ban = rig.hs1.store.member_event(&room, &rig.bob.id).await?;
    rig.hs2
        .store
        .wait_for(&[ban], As::Event, Duration::from_secs(10))
        .await?;
    nothing_arrives_after(rig, &room).await?;
    burdock.stop().await
}

pub async fn nothing_arrives_after_a_server_left(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = rig.shared_room(RoomOptions::default()).await?;
    rig.bob.leave(&room).await?;
    rig.hs1
        .store
        .wait_for_membership(&room, &rig.bob.id, "leave", Duration::from_secs(20))
        .await?;
    nothing_arrives_after(rig, &room).await?;
    burdock.stop().await
}

pub async fn the_withdrawal_of_an_invitation_arrives(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = rig.alice.create_room(RoomOptions::default()).await?;
    rig.alice.invite(&room, &rig.bob.id).await?;
    rig.alice.kick(&room, &rig.bob.id).await?;
    let kick = rig.hs1.store.member_event(&room, &rig.bob.id).await?;
    rig.gate.record().wait_for(&[kick], Duration::from_secs(10)).await?;
    rig.gate.record().check()?;
    burdock.stop().await
}

pub async fn servers_that_misbehave_hold_up_no_other(rig: &Rig) -> Result<()> {
    let burdock = rig.burdock().await?;
    let room = rig.shared_room(RoomOptions::default()).await?;
    let fakes = rig.joined_fakes(6, &room).await?;
    let modes = [
        Mode::Stall,
        Mode::HangUp,
        Mode::Down,
        Mode::Refuse(500),
        Mode::Refuse(400),
        Mode::PduErrors,
    ];
    for (fake, mode) in fakes.iter().zip(modes) {
        fake.set_mode(mode);
    }
    let events = rig.alice.send_many(&room, 20, "hello").await?;
    rig.hs2
        .store
        .wait_for(&events, As::Event, Duration::from_secs(10))
        .await?;
    // An error for a PDU is an answer like another: it is not sent again, and what follows is sent.
    fakes[5].record.wait_for(&events, Duration::from_secs(5)).await?;
    // And once they behave, they get the room's newest, with no new traffic.
    for fake in &fakes {
        fake.set_mode(Mode::Accept);
    }
    for fake in &fakes {
        fake.record.wait_for(&events[19..], Duration::from_secs(30)).await?;
        fake.record.check()?;
    }
    ensure!(
        fakes[5].record.repeats(&room) == 0,
        "events were sent again to a server that had answered for each"
    );
    burdock.stop().await
}
