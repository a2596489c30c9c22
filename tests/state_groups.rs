//! State groups as Synapse stores them, read through the cache of joined hosts, against a plain model.

#![expect(dead_code, reason = "the support file is shared")]

#[path = "support/database.rs"]
mod database;
#[path = "support/state_fixture.rs"]
mod state_fixture;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
};

use burdock::core::{
    id::{StateGroup, domain_of},
    state::joined_hosts::JoinedHosts,
    store::StoreError,
};
use proptest::{prelude::*, test_runner::TestRunner};
use state_fixture::{Event, Fixture, with_databases};

const USERS: [&str; 7] = [
    "@a:one",
    "@b:one",
    "@a:two",
    "@a:three:8448",
    "@b:three:8448",
    "@a:us.example",
    "@nowhere",
];
const MEMBERSHIPS: [&str; 4] = ["join", "leave", "invite", "ban"];

/// One group of a random history.
#[derive(Debug, Clone)]
struct Made {
    /// Which earlier group it descends from, if it can.
    from: Option<prop::sample::Index>,
    /// It is stored in full, though it descends from one.
    snapshot: bool,
    /// Whose membership it changes.
    changes: Vec<(usize, usize)>,
    /// It names a key again that it does not change.
    topic: bool,
}

fn history() -> impl Strategy<Value = (Vec<Made>, Vec<prop::sample::Index>)> {
    let made = (
        prop::option::weighted(0.9, any::<prop::sample::Index>()),
        prop::bool::weighted(0.2),
        prop::collection::vec((0..USERS.len(), 0..MEMBERSHIPS.len()), 0..4),
        any::<bool>(),
    )
        .prop_map(|(from, snapshot, changes, topic)| Made {
            from,
            snapshot,
            changes,
            topic,
        });
    (
        prop::collection::vec(made, 1..14),
        prop::collection::vec(any::<prop::sample::Index>(), 1..30),
    )
}

/// User -> (membership event, membership).
type State = BTreeMap<&'static str, (String, &'static str)>;

async fn store_history(fixture: &Fixture, history: &[Made], next: &AtomicI64) -> (String, Vec<(StateGroup, State)>) {
    let mut groups: Vec<(StateGroup, State)> = Vec::new();
    let room = format!("!{}", next.load(Ordering::Relaxed));
    for made in history {
        let id = next.fetch_add(1, Ordering::Relaxed);
        let parent = made
            .from
            .filter(|_| !groups.is_empty())
            .map(|index| &groups[index.index(groups.len())]);
        let mut state = parent.map(|(_, state)| state.clone()).unwrap_or_default();
        let mut changed = BTreeSet::new();
        for (user, membership) in &made.changes {
            let (user, membership) = (USERS[*user], MEMBERSHIPS[*membership]);
            if changed.insert(user) {
                let event = format!("${id}-{user}");
                fixture.membership(&event, &room, user, membership).await;
                state.insert(user, (event, membership));
            }
        }
        let edge = parent.map(|(group, _)| group.0).filter(|_| !made.snapshot);
        let mut rows: Vec<(&str, &str, &str)> = state
            .iter()
            .filter(|(user, _)| edge.is_none() || changed.contains(**user))
            .map(|(user, (event, _))| ("m.room.member", *user, event.as_str()))
            .collect();
        if made.topic {
            rows.push(("m.room.topic", "@a:one", "$topic"));
        }
        let group = fixture.group(id, &room, edge, &rows).await;
        groups.push((group, state));
    }
    (room, groups)
}

fn model(state: &State) -> Vec<(String, u32)> {
    let mut hosts = BTreeMap::new();
    for (user, (_, membership)) in state {
        if let ("join", Some(server)) = (*membership, domain_of(user)) {
            *hosts.entry(server.to_owned()).or_insert(0) += 1;
        }
    }
    hosts.into_iter().collect()
}

#[test]
fn hosts_are_those_of_a_plain_model_whatever_the_history_and_the_order_of_asking() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let handle = runtime.handle().clone();
    runtime.block_on(with_databases(|fixture| {
        let handle = handle.clone();
        async move {
            let next = AtomicI64::new(1);
            tokio::task::block_in_place(|| {
                let mut runner = TestRunner::new(ProptestConfig {
                    cases: 60,
                    failure_persistence: None,
                    ..Default::default()
                });
                runner
                    .run(&history(), |(history, asked)| {
                        handle.block_on(async {
                            let (room, groups) = store_history(&fixture, &history, &next).await;
                            let cache = JoinedHosts::default();
                            for index in asked {
                                let (group, state) = &groups[index.index(groups.len())];
                                let hosts = cache.of(&fixture.store, &room.as_str().into(), *group).await.unwrap();
                                let found: Vec<(String, u32)> = hosts
                                    .iter()
                                    .map(|server| (server.to_string(), hosts.users(server.as_str())))
                                    .collect();
                                prop_assert_eq!(found, model(state));
                                for server in ["one", "two", "three:8448"] {
                                    let here = |(user, (_, membership)): (&&str, &(String, &str))| {
                                        domain_of(user) == Some(server) && ["join", "invite"].contains(membership)
                                    };
                                    let name = server.into();
                                    let has = fixture
                                        .store
                                        .server_has_member(*group, &name, &["join", "invite"])
                                        .await;
                                    prop_assert_eq!(has.unwrap(), state.iter().any(here));
                                }
                            }
                            Ok(())
                        })
                    })
                    .unwrap();
            });
        }
    }));
}

#[tokio::test]
async fn a_group_costs_what_changed_and_is_computed_once() {
    with_databases(|fixture| async move {
        let room = fixture.room("!room").await;
        for (id, user, membership) in [
            ("$a", "@a:one", "join"),
            ("$b", "@b:two", "join"),
            ("$b2", "@b:two", "leave"),
        ] {
            fixture.membership(id, "!room", user, membership).await;
        }
        let member = "m.room.member";
        let first = fixture
            .group(1, "!room", None, &[(member, "@a:one", "$a"), (member, "@b:two", "$b")])
            .await;
        let topic = fixture.group(2, "!room", Some(1), &[("m.room.topic", "", "$t")]).await;
        let left = fixture.group(3, "!room", Some(2), &[(member, "@b:two", "$b2")]).await;

        let cache = Arc::new(JoinedHosts::default());
        let askers: Vec<_> = (0..20)
            .map(|_| {
                let (cache, store, room) = (Arc::clone(&cache), fixture.store.clone(), room.clone());
                tokio::spawn(async move { cache.of(&store, &room, first).await.unwrap() })
            })
            .collect();
        let mut answers = Vec::new();
        for asker in askers {
            answers.push(asker.await.unwrap());
        }
        assert!(answers.iter().all(|hosts| Arc::ptr_eq(hosts, &answers[0])));
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        assert_eq!((count(&cache.stats().full), count(&cache.stats().incremental)), (1, 0));

        let same = cache.of(&fixture.store, &room, topic).await.unwrap();
        assert!(
            Arc::ptr_eq(&same, &answers[0]),
            "no member changed, so the hosts are shared"
        );
        let after = cache.of(&fixture.store, &room, left).await.unwrap();
        assert!(after.contains("one") && !after.contains("two"));
        assert_eq!((count(&cache.stats().full), count(&cache.stats().incremental)), (1, 2));
    })
    .await;
}

#[tokio::test]
async fn a_damaged_chain_is_an_error_and_no_endless_walk() {
    with_databases(|fixture| async move {
        let damaged = async |group: i64| match fixture.store.host_changes(StateGroup(group), &[]).await {
            Err(StoreError::Damaged { what, .. }) => what,
            other => panic!("group {group}: {other:?}"),
        };
        assert!(damaged(404).await.contains("missing"));

        fixture.group(10, "!room", Some(9), &[]).await;
        assert!(damaged(10).await.contains("missing"), "its base was deleted");

        fixture.group(20, "!room", Some(21), &[]).await;
        fixture.group(21, "!room", Some(20), &[]).await;
        assert!(damaged(21).await.contains("made later"));
        assert!(damaged(20).await.contains("made later"));

        fixture
            .run(
                "WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)
                 INSERT INTO state_groups SELECT 100 + i, '!room', '$e' FROM n;
                 WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 9999)
                 INSERT INTO state_group_edges SELECT 101 + i, 100 + i FROM n",
            )
            .await;
        assert!(damaged(10_100).await.contains("longer"));
        assert!(fixture.store.host_changes(StateGroup(10_099), &[]).await.is_ok());
    })
    .await;
}

#[tokio::test]
async fn one_state_event_is_the_nearest_under_its_key() {
    with_databases(|fixture| async move {
        fixture.room("!room").await;
        let visibility = "m.room.history_visibility";
        let event = |id, ordering, content| Event::new(id, ordering).kind(visibility).content(content);
        fixture
            .event(event("$old", 1, r#"{"history_visibility":"joined"}"#))
            .await;
        // PostgreSQL refuses to make jsonb of this escape: the text must never be cast.
        fixture
            .event(event("$new", 2, r#"{"history_visibility":"shared","x":"\u0000"}"#))
            .await;
        fixture
            .group(
                1,
                "!room",
                None,
                &[(visibility, "", "$old"), (visibility, "other", "$new")],
            )
            .await;
        fixture.group(2, "!room", Some(1), &[("m.room.topic", "", "$t")]).await;
        fixture.group(3, "!room", Some(2), &[(visibility, "", "$new")]).await;
        let at = async |group| {
            fixture
                .store
                .state_event(StateGroup(group), visibility, "")
                .await
                .unwrap()
        };
        assert!(at(1).await.unwrap().contains("joined"));
        assert!(at(2).await.unwrap().contains("joined"));
        assert!(at(3).await.unwrap().contains("shared"));
        assert_eq!(
            fixture
                .store
                .state_event(StateGroup(3), "m.room.name", "")
                .await
                .unwrap(),
            None
        );
        assert!(
            fixture
                .store
                .state_event(StateGroup(3), "m.room.topic", "")
                .await
                .is_err(),
            "named, but not stored"
        );
    })
    .await;
}
