//! Which servers a change of current state brought in, on Synapse's schema.

#![expect(dead_code, reason = "the support file is shared")]

#[path = "support/database.rs"]
mod database;
#[path = "support/state_fixture.rs"]
mod state_fixture;

use std::collections::{BTreeMap, BTreeSet};

use burdock::core::{
    clock::Millis,
    id::{StreamOrdering, domain_of},
    state::new_servers::new_servers,
};
use database::US;
use proptest::{prelude::*, test_runner::TestRunner};
use state_fixture::{Fixture, with_databases};

const NOW: Millis = Millis(1_000_000);
const ANN: &str = "@ann:us.example";

async fn found(fixture: &Fixture, after: i64, up_to: i64) -> Vec<String> {
    let scan = new_servers(&fixture.store, StreamOrdering(after), StreamOrdering(up_to), NOW)
        .await
        .unwrap();
    assert_eq!(scan.read_up_to.0, up_to);
    scan.found
        .iter()
        .map(|new| format!("{} {}", new.room_id, new.server))
        .collect()
}

#[tokio::test]
async fn only_rooms_where_something_of_ours_is_alive_are_looked_at() {
    with_databases(|fixture| async move {
        for (room, sender, expires_at) in [
            ("!alive", ANN, NOW.0 + 1),
            ("!dead", ANN, NOW.0),
            ("!theirs", "@x:y:us.example", NOW.0 + 1),
        ] {
            fixture.change(10, room, ANN, Some("join")).await;
            let ordering = i32::try_from(20 + room.len()).unwrap();
            fixture.sticky(ordering, room, sender, expires_at).await;
            fixture.change(40, room, "@a:s", Some("invite")).await;
            fixture.change(45_000, room, "@a:s", Some("join")).await;
            fixture.change(45_001, room, "@a:s", Some("join")).await;
        }
        assert_eq!(found(&fixture, 20, 60_000).await, ["!alive s"]);
        assert_eq!(
            found(&fixture, 44_999, 45_000).await,
            ["!alive s"],
            "changes of profile follow"
        );
        assert!(found(&fixture, 45_000, 60_000).await.is_empty());
        assert!(found(&fixture, 20, 44_999).await.is_empty());
        assert!(found(&fixture, 5, 39).await.is_empty(), "that brought ourselves in");
        // The room is left: a row without an event for each member.
        fixture.change(70_000, "!alive", "@a:s", None).await;
        fixture.change(70_000, "!alive", ANN, None).await;
        assert!(found(&fixture, 60_000, 70_000).await.is_empty());
        assert_eq!(found(&fixture, 20, 70_000).await, ["!alive s"]);

        let first = async |now, persisted| {
            fixture
                .store
                .first_delta_cursor(Millis(now), StreamOrdering(persisted))
                .await
                .unwrap()
                .0
        };
        assert_eq!(first(NOW.0, 100).await, 25, "just below the sticky event of !alive");
        assert_eq!(first(NOW.0 + 1, 100).await, 100);
    })
    .await;
}

#[test]
fn each_stretch_finds_what_a_plain_model_finds() {
    let users = [ANN, "@bob:us.example", "@a:s", "@b:s", "@c:s", "@a:t"];
    let change = (
        0..users.len(),
        prop::sample::select(vec![Some("join"), Some("join"), Some("leave"), None]),
        0..3_i64,
    );
    let history = (
        prop::collection::vec(change, 1..20),
        prop::collection::vec(0..25_i64, 0..4),
    );

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let handle = runtime.handle().clone();
    runtime.block_on(with_databases(|fixture| {
        let (handle, history) = (handle.clone(), &history);
        async move {
            tokio::task::block_in_place(|| {
                let config = ProptestConfig {
                    cases: 60,
                    failure_persistence: None,
                    ..Default::default()
                };
                let run = TestRunner::new(config).run(history, |(changes, cuts)| {
                    handle.block_on(async {
                        fixture
                            .run(
                                "DELETE FROM current_state_delta_stream; DELETE FROM current_state_events;
                             DELETE FROM sticky_events; DELETE FROM room_memberships",
                            )
                            .await;
                        fixture.sticky(1, "!room", ANN, NOW.0 + 1).await;
                        let mut joined: BTreeMap<&str, bool> = BTreeMap::new();
                        let mut batches: BTreeMap<i64, BTreeMap<&str, Option<&str>>> = BTreeMap::new();
                        let mut position = 1;
                        for (user, membership, step) in changes {
                            position += step;
                            batches
                                .entry(position)
                                .or_default()
                                .entry(users[user])
                                .or_insert(membership);
                        }
                        let mut expected = BTreeMap::new();
                        for (position, batch) in batches {
                            let there = |server: &str, joined: &BTreeMap<&str, bool>| {
                                joined
                                    .iter()
                                    .any(|(user, joined)| *joined && domain_of(user) == Some(server))
                            };
                            let mut brought = BTreeSet::new();
                            for (user, membership) in &batch {
                                let server = domain_of(user).unwrap();
                                if *membership == Some("join") && !there(server, &joined) {
                                    brought.insert(server);
                                }
                            }
                            if !brought.contains(US) {
                                expected.insert(position, brought);
                            }
                            for (user, membership) in batch {
                                fixture.change(position, "!room", user, membership).await;
                                joined.insert(user, membership == Some("join"));
                            }
                        }
                        let mut cuts: Vec<i64> = cuts.into_iter().chain([0, 60]).collect();
                        cuts.sort_unstable();
                        for stretch in cuts.windows(2) {
                            let model: BTreeSet<String> = expected
                                .iter()
                                .filter(|(position, _)| stretch[0] < **position && **position <= stretch[1])
                                .flat_map(|(_, servers)| servers.iter().map(|server| format!("!room {server}")))
                                .collect();
                            let found = found(&fixture, stretch[0], stretch[1]).await;
                            prop_assert_eq!(found, model.into_iter().collect::<Vec<_>>(), "{:?}", stretch);
                        }
                        Ok(())
                    })
                });
                run.unwrap();
            });
        }
    }));
}
