//! Several processes write `events` with ids of one real sequence.

#[path = "support/database.rs"]
mod database;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use burdock::core::{
    id::{InstanceName, StreamOrdering, Token},
    replication::{
        self,
        gap::Group,
        http_gaps::HttpGaps,
        local_bus::LocalBus,
        master::{self, MasterStart},
        task::{self, Heard, Subscription},
    },
    store::Store,
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
