//! What Burdock stands on is restarted under traffic, and Burdock is not.

use std::time::Duration;

use anyhow::{Result, bail};

use crate::rig::{Rig, client::RoomOptions};

/// What is restarted.
#[derive(Clone, Copy)]
enum What {
    Redis,
    Postgres,
    Synapse,
}

async fn restart_under_traffic(rig: &Rig, what: What) -> Result<()> {
    let mut burdock = rig.burdock().await?;
    let room = rig.shared_room(RoomOptions::default()).await?;
    let fakes = rig.joined_fakes(5, &room).await?;
    let traffic = rig.traffic(&room);
    tokio::time::sleep(Duration::from_secs(2)).await;
    match what {
        What::Redis => {
            rig.redis.stop().await;
            tokio::time::sleep(Duration::from_secs(3)).await;
            // Nothing is said after it is back: what was said meanwhile must be found without.
            traffic.stop().await?;
            rig.redis.ensure().await?;
        }
        What::Postgres => {
            if !rig.restart_postgres().await? {
                bail!("PostgreSQL is not ours to restart: run this by tests/run");
            }
            tokio::time::sleep(Duration::from_secs(5)).await;
            traffic.stop().await?;
        }
        What::Synapse => {
            rig.hs1.stop().await;
            rig.hs1.ensure().await?;
            tokio::time::sleep(Duration::from_secs(3)).await;
            traffic.stop().await?;
        }
    }
    let within = Duration::from_secs(75);
    if matches!(what, What::Postgres) {
        // The real receiver has lost its database as well. It refuses everything for some seconds, and is then behind. And if it
        // was at work on an event, its task for the room dies and leaves a lock behind for two minutes, also across a
        // start: what it accepts meanwhile it does not work on.
        rig.newest_message_is_accepted(&room, within).await?;
        rig.all_messages_arrive_at(&room, &fakes, within).await?;
    } else {
        rig.all_messages_arrive(&room, &fakes, within).await?;
    }
    burdock.check_running()?;
    burdock.stop().await
}

pub async fn redis(rig: &Rig) -> Result<()> {
    restart_under_traffic(rig, What::Redis).await
}

pub async fn postgresql(rig: &Rig) -> Result<()> {
    restart_under_traffic(rig, What::Postgres).await
}

pub async fn synapses_main_process(rig: &Rig) -> Result<()> {
    restart_under_traffic(rig, What::Synapse).await
}
