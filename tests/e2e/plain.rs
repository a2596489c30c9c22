//! Ordinary events: who gets them, and who does not.

use std::time::Duration;

use anyhow::Result;

use crate::rig::{Rig, client::RoomOptions, sender::Kind, store::As};

/// Shows that the rig itself works: Synapse's own sender does this.
pub async fn python_a_plain_event_arrives(rig: &Rig) -> Result<()> {
    let sender = rig.sender(Kind::Python, "fed1", &["fed1"]).await?;
    let room = rig.shared_room(RoomOptions::default()).await?;
    let event = rig.alice.send(&room, "hello").await?;
    rig.hs2
        .store
        .wait_for(&[event.clone()], As::Event, Duration::from_secs(10))
        .await?;
    rig.gate.record().wait_for(&[event], Duration::from_secs(1)).await?;
    rig.gate.record().check()?;
    sender.stop().await
}
