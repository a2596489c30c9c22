//! The story: what happens, in which order, and who is owed what in the end.

use std::{path::Path, time::Duration};

use anyhow::{Context, ensure};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use tokio::time::{Instant, sleep};

use super::{
    DemoArgs,
    certificates::Certificates,
    ours::Ours,
    progress::{Bar, Progress},
    remote::{Remote, free_port},
    table::Row,
};
use crate::core::{clock::Millis, id::RoomId};

/// All that is owed must have come within this time.
const PATIENCE: Duration = Duration::from_secs(20);

/// A sticky event that lives through the whole story.
const LONG: Duration = Duration::from_mins(10);

/// One that expires before anybody late can have it.
const SHORT: Duration = Duration::from_millis(300);

/// A sticky event of ours.
struct Sent {
    id: String,
    short: bool,
}

/// What our server sent.
#[derive(Default)]
struct Sticky(Vec<Sent>);

impl Sticky {
    /// Those that outlive the story.
    fn long(&self) -> Vec<&str> {
        self.0
            .iter()
            .filter(|sent| !sent.short)
            .map(|sent| sent.id.as_str())
            .collect()
    }

    fn short(&self) -> usize {
        self.0.iter().filter(|sent| sent.short).count()
    }
}

/// How it ended.
pub struct Ending {
    pub rows: Vec<Row>,
    /// Everything owed to a server that answers was found there.
    pub complete: bool,
}

/// Tells it.
pub async fn tell(args: &DemoArgs, dir: &Path, progress: &Progress) -> anyhow::Result<Ending> {
    let mut random = SmallRng::seed_from_u64(args.seed);
    let certificates = Certificates::make(dir)?;
    let mut ours = Ours::start(&dir.join("ours"), &certificates, free_port()?, free_port()?).await?;
    progress.say(&format!("our homeserver {} is up, Burdock in it", ours.name));
    ours.register("alice").await?;
    let room = RoomId::from(ours.create_room().await?.as_str());
    let began = progress.began();

    let mut late = vec![];
    for number in 0..usize::from(args.servers) - 2 {
        late.push(Remote::start(&dir.join(format!("late{number}")), &certificates).await?);
    }
    let mut away = Remote::start(&dir.join("away"), &certificates).await?;
    let mut silent = Remote::start(&dir.join("silent"), &certificates).await?;
    for remote in [&mut away, &mut silent] {
        remote.join(&room, &ours.name, began).await?;
        progress.say(&format!("{} joined the room", remote.name));
    }
    silent.fall_silent().await?;
    progress.say(&format!("{} will not answer any more", silent.name));

    let mut sticky = Sticky::default();
    let first = usize::from(random.random_range(1..args.sticky / 2 + 1));
    send(&mut ours, &room, &mut random, first, &mut sticky).await?;
    progress.say(&format!("{first} sticky events sent"));
    away.holds(&sticky.long(), &room, PATIENCE, None).await?;
    away.go_away().await;
    progress.say(&format!("{} has them and goes away", away.name));
    let while_there = sticky.0.len();
    send(
        &mut ours,
        &room,
        &mut random,
        usize::from(args.sticky) - first,
        &mut sticky,
    )
    .await?;
    progress.say(&format!(
        "{} more sent, {} of all expire at once",
        usize::from(args.sticky) - first,
        sticky.short()
    ));
    // What catch-up owes to who was away, besides.
    let newest = ours.send(&room, "the newest ordinary message", None).await?;
    sleep(SHORT).await;

    let bars: Vec<Bar> = late
        .iter()
        .map(|remote| progress.bar(&remote.name, sticky.long().len()))
        .collect();
    for remote in &mut late {
        remote.join(&room, &ours.name, began).await?;
        progress.say(&format!("{} joined the room, late", remote.name));
    }
    let held = first_arrival(&late, &room, &ours).await?;
    ours.kill().await?;
    progress.say(&format!(
        "our homeserver and Burdock are killed (kill -9); the late have {held} of {}",
        sticky.long().len() * late.len()
    ));
    away.come_back().await?;
    progress.say(&format!("{} is back", away.name));
    ours.restart().await?;
    progress.say("our homeserver and Burdock are back");

    let mut rows = vec![];
    let mut complete = true;
    let owed = sticky.long();
    for (remote, bar) in late.iter().zip(&bars) {
        complete &= arrived(&remote.holds(&owed, &room, PATIENCE, Some(bar)).await, progress);
        rows.push(row(remote, "joined late", &owed, sticky.short(), &room).await?);
    }
    complete &= arrived(&away.holds(&owed, &room, PATIENCE, None).await, progress);
    complete &= arrived(&away.has(&newest, &room, PATIENCE).await, progress);
    let expired = sticky.0[while_there..].iter().filter(|sent| sent.short).count();
    rows.push(row(&away, "was away", &owed, expired, &room).await?);
    rows.push(row(&silent, "never answered", &owed, sticky.short(), &room).await?);
    drop(bars);
    let live = ours.send(&room, "a last message", None).await?;
    for remote in late.iter().chain([&away]) {
        complete &= arrived(&remote.has(&live, &room, PATIENCE).await, progress);
    }
    progress.say(if complete {
        "everything owed has arrived, and a last ordinary message"
    } else {
        "something owed did not arrive"
    });

    ours.stop().await.context("at the end")?;
    for remote in late.into_iter().chain([away, silent]) {
        remote.stop().await;
    }
    Ok(Ending { rows, complete })
}

/// Waits until a late joiner has something: Burdock is in the middle of it. Returns how much all have together.
async fn first_arrival(late: &[Remote], room: &RoomId, ours: &Ours) -> anyhow::Result<usize> {
    let began = Instant::now();
    loop {
        let mut held = 0;
        for remote in late {
            held += remote.sticky(room).await?.len();
        }
        if held > 0 {
            return Ok(held);
        }
        ensure!(
            began.elapsed() < PATIENCE,
            "no late joiner got a sticky event:\n{}",
            ours.log()
        );
        sleep(Duration::from_millis(1)).await;
    }
}

/// Says what did not arrive.
fn arrived(outcome: &anyhow::Result<()>, progress: &Progress) -> bool {
    if let Err(error) = outcome {
        progress.say(&format!("{error:#}"));
    }
    outcome.is_ok()
}

async fn row(remote: &Remote, role: &'static str, owed: &[&str], expired: usize, room: &RoomId) -> anyhow::Result<Row> {
    let held = remote.sticky(room).await?;
    let came: Vec<Millis> = owed.iter().filter_map(|id| held.get(*id)).copied().collect();
    let last = came.iter().max().map(|last| last.since(remote.since));
    Ok(Row {
        server: remote.name.clone(),
        role,
        joined: remote.joined,
        owed: owed.len(),
        delivered: came.len(),
        expired,
        transactions: remote.transactions(),
        delay: last.map(|ms| Duration::from_millis(ms.unsigned_abs())),
    })
}

/// Sends `count` sticky events, a few of them short-lived, with ordinary messages between.
async fn send(
    ours: &mut Ours,
    room: &RoomId,
    random: &mut SmallRng,
    count: usize,
    sticky: &mut Sticky,
) -> anyhow::Result<()> {
    for _ in 0..count {
        while random.random_bool(0.3) {
            ours.send(room, "an ordinary message", None).await?;
        }
        // One at least is owed to whoever comes late.
        let short = !sticky.0.is_empty() && random.random_bool(0.1);
        let id = ours
            .send(room, "a sticky message", Some(if short { SHORT } else { LONG }))
            .await?;
        sticky.0.push(Sent { id, short });
    }
    Ok(())
}
