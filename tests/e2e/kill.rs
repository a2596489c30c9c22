//! `kill -9`, at any moment.

use std::time::Duration;

use anyhow::Result;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use crate::rig::{Rig, client::RoomOptions};

const DESTINATIONS: usize = 100;
const KILLS: u32 = 20;

/// Every event, not only each room's newest, reaches every server that was up, and no transaction id stands for two
/// bodies (which [`crate::fake_remote::record::Record::check`] finds).
pub async fn every_event_reaches_every_server_all_the_same(rig: &Rig) -> Result<()> {
    let room = rig.shared_room(RoomOptions::default()).await?;
    let fakes = rig.joined_fakes(DESTINATIONS, &room).await?;
    let seed = u64::try_from(burdock::core::clock::now().wall.0)?;
    eprintln!("  the moments are drawn from seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let traffic = rig.traffic(&room);
    for _ in 0..KILLS {
        // Not only when it is ready: the start is as good a moment as another.
        let burdock = rig.burdock_unready()?;
        tokio::time::sleep(Duration::from_millis(random.random_range(50..3000))).await;
        burdock.kill();
    }
    let mut burdock = rig.burdock().await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    traffic.stop().await?;
    rig.all_messages_arrive(&room, &fakes, Duration::from_mins(1)).await?;
    burdock.check_running()?;
    burdock.stop().await
}
