//! Writers of `events` with ids of a real source: several processes and PostgreSQL's sequence, one process and SQLite.

#[path = "support/database.rs"]
mod database;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use burdock::core::{
    clock::Millis,
    id::{InstanceName, StreamOrdering, Token},
    replication::{
        self,
        gap::Group,
        http_gaps::HttpGaps,
        local_bus::LocalBus,
        master::{self, MasterStart},
        task::{self, Heard, Subscription},
    },
    store::{Outcome, PersistEvent, Store},
};
use database::TestDatabase;
use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::value::RawValue;
use tokio::{task::JoinSet, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

const PATIENCE: Duration = Duration::from_secs(60);
const WRITERS: [&str; 3] = ["master", "persister1", "persister2"];

/// What was committed, and what is being written.
#[derive(Default)]
struct Truth {
    committed: BTreeSet<i64>,
    open: BTreeSet<i64>,
}

async fn connects(subscription: &mut Subscription) {
    let heard = timeout(PATIENCE, subscription.heard.recv())
        .await
        .expect("no connection");
    assert_eq!(heard, Some(Heard::Connected));
}

#[tokio::test]
async fn writers_that_share_a_sequence_agree_in_the_end_and_nobody_is_ever_ahead() {
    let Some(database) = TestDatabase::new().await else {
        return;
    };
    let store = database.store("master").await;
    let names: Vec<_> = WRITERS.iter().map(|name| InstanceName::from(*name)).collect();
    let (shutdown, tracker) = (CancellationToken::new(), TaskTracker::new());
    let bus = LocalBus::default();
    let mut masters = Vec::new();
    for name in &names {
        let start: MasterStart = replication::master_start(&store, &names, Token(1)).await.unwrap();
        let master = master::start(bus.clone(), name.clone(), start, store.clone(), &shutdown, &tracker);
        masters.push(master);
    }
    let start = replication::start_positions(&store, &names).await.unwrap();
    let nowhere = HttpGaps::nowhere();
    let mut sender = task::start_on(bus, "fs1".into(), start, store.clone(), nowhere, &shutdown, &tracker);
    connects(&mut sender).await;
    for master in &mut masters {
        connects(&mut master.subscription).await;
    }
    let Store::Postgres(engine) = store else {
        panic!("a copy of Synapse's database");
    };

    let truth = Arc::new(Mutex::new(Truth::default()));
    let mut writing = JoinSet::new();
    // The last writer is idle.
    for task in 0..8 {
        let events = masters[task % 2].streams.events.clone();
        let (truth, engine) = (truth.clone(), engine.clone());
        writing.spawn(async move {
            let mut rng = StdRng::seed_from_u64(u64::try_from(task).unwrap());
            for _ in 0..40 {
                let write = events.draw(engine.next_ids(rng.random_range(1..4))).await.unwrap();
                let ids: Vec<i64> = write.ids().iter().map(|id| id.0).collect();
                truth.lock().open.extend(&ids);
                for _ in 0..rng.random_range(0..6) {
                    tokio::task::yield_now().await;
                }
                let mut truth = truth.lock();
                truth.open.retain(|id| !ids.contains(id));
                if rng.random_bool(0.1) {
                    drop(write);
                    continue;
                }
                truth.committed.extend(&ids);
                let row = RawValue::from_string(r#"["ev",[]]"#.to_owned()).unwrap();
                let token = Token(ids[0]);
                write.finish(vec![Group { token, rows: vec![row] }]);
            }
        });
    }
    // The readers are asked all the while.
    let mut up_to = [&sender]
        .into_iter()
        .chain(masters.iter().map(|master| &master.subscription));
    let up_to: Vec<_> = up_to
        .by_ref()
        .map(|subscription| subscription.events_up_to.clone())
        .collect();
    loop {
        tokio::select! {
            biased;
            ended = writing.join_next() => match ended {
                Some(ended) => ended.unwrap(),
                None => break,
            },
            () = tokio::task::yield_now() => {
                let truth = truth.lock();
                let lowest = truth.open.first().copied().unwrap_or(i64::MAX);
                for up_to in &up_to {
                    assert!(up_to.borrow().0 < lowest);
                }
            }
        }
    }
    let last = StreamOrdering(*truth.lock().committed.last().unwrap());
    for mut up_to in up_to {
        let reached = timeout(PATIENCE, up_to.wait_for(|at| *at >= last)).await;
        assert_eq!(*reached.expect("stays behind").unwrap(), last);
    }
    shutdown.cancel();
    tracker.close();
    tracker.wait().await;
}

/// The ids come with the rows here, and one write ends after the other; that they are told of it in that order is chance.
#[tokio::test]
async fn an_embedded_master_publishes_what_it_stores() {
    const WRITES: i64 = 30;
    let database = TestDatabase::embedded().await;
    let store = database.store("master").await;
    let names = [InstanceName::from("master")];
    let (shutdown, tracker) = (CancellationToken::new(), TaskTracker::new());
    let bus = LocalBus::default();
    let start = replication::start_positions(&store, &names).await.unwrap();
    let nowhere = HttpGaps::nowhere();
    let mut sender = task::start_on(
        bus.clone(),
        "fs1".into(),
        start,
        store.clone(),
        nowhere,
        &shutdown,
        &tracker,
    );
    let start = replication::master_start(&store, &names, Token(1)).await.unwrap();
    let mut master = master::start(bus, "master".into(), start, store.clone(), &shutdown, &tracker);
    connects(&mut sender).await;
    connects(&mut master.subscription).await;
    let Store::Sqlite(engine) = store else {
        panic!("an embedded database");
    };
    engine.create_room(&"!r".into(), "10", "@ann:us.example").await.unwrap();
    assert_eq!(sender.events_up_to.borrow().0, 0, "the first event gets 1");
    let mut writing = JoinSet::new();
    for number in 0..WRITES {
        let (events, engine) = (master.streams.events.clone(), engine.clone());
        writing.spawn(async move {
            let mut write = events.begin();
            let event = outlier(&format!("${number}"));
            let stored = engine.persist(&[event], &[], Millis(1)).await.unwrap();
            write.drawn(stored.events.iter().map(|(_, at)| *at).collect()).unwrap();
            let token = Token(write.ids()[0].0);
            let row = RawValue::from_string(r#"["ev",[]]"#.to_owned()).unwrap();
            write.finish(vec![Group { token, rows: vec![row] }]);
        });
    }
    while let Some(ended) = writing.join_next().await {
        ended.unwrap();
    }
    for mut up_to in [sender.events_up_to, master.subscription.events_up_to] {
        let last = StreamOrdering(WRITES);
        let reached = timeout(PATIENCE, up_to.wait_for(|at| *at >= last)).await;
        assert_eq!(*reached.expect("stays behind").unwrap(), last);
    }
    // After a restart it goes on where it was.
    let start = replication::master_start(&Store::Sqlite(engine), &names, Token(1))
        .await
        .unwrap();
    assert_eq!(start.events.up_to(), StreamOrdering(WRITES));
    shutdown.cancel();
    tracker.close();
    tracker.wait().await;
}

fn outlier(event_id: &str) -> PersistEvent {
    PersistEvent {
        event_id: event_id.into(),
        room_id: "!r".into(),
        kind: "m.room.message".to_owned(),
        state_key: None,
        sender: "@ann:us.example".to_owned(),
        depth: 1,
        sent: Millis(1),
        json: "{}".to_owned(),
        format_version: 3,
        metadata: serde_json::Map::new(),
        prev_events: Vec::new(),
        auth_events: Vec::new(),
        membership: None,
        redacts: None,
        sticky_until: None,
        outcome: Outcome::Outlier,
    }
}
