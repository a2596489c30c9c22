//! State groups as we store them: against a plain model, from several writers at once, and beside Synapse.

#[macro_use]
#[path = "support/database.rs"]
mod database;

use std::{
    collections::{BTreeMap, BTreeSet},
    process::{Command, Stdio},
    sync::Arc,
};

use burdock::core::{
    id::{EventId, StateGroup},
    state::{
        groups::StateGroups,
        map::{self, MAX_HOPS, NewStateGroup, PreviousGroup, StateDelta, StateFilter, StateKey, StateMap},
    },
    store::{Store, StoreError},
};
use database::{TestDatabase, US};
use proptest::{prelude::*, test_runner::TestRunner};
use serde_json::{Value as Json, json};

const ROOM: &str = "!room:us.example";

fn group(room: &str, previous: Option<PreviousGroup>, changes: StateDelta) -> NewStateGroup {
    NewStateGroup {
        room_id: room.into(),
        event_id: "$for".into(),
        previous,
        changes,
    }
}

fn set(kind: &str, key: &str, event: &str) -> (StateKey, Option<EventId>) {
    (StateKey::new(kind, key), Some(event.into()))
}

async fn store_one(store: &Store, previous: Option<StateGroup>, changes: StateDelta) -> StateGroup {
    let group = group(ROOM, previous.map(PreviousGroup::Stored), changes);
    store.store_state_groups(&[group]).await.unwrap()[0]
}

/// One group of a random history.
#[derive(Debug, Clone)]
struct Made {
    from: Option<prop::sample::Index>,
    /// Type, key, and the event's number, or none for a removal.
    changes: Vec<(u8, u8, Option<u16>)>,
    /// It is stored in the same call as the one before it.
    together: bool,
}

fn history() -> impl Strategy<Value = Vec<Made>> {
    let change = (0..3_u8, 0..3_u8, prop::option::weighted(0.9, any::<u16>()));
    let made = (
        prop::option::weighted(0.95, any::<prop::sample::Index>()),
        prop::collection::vec(change, 0..4),
        prop::bool::weighted(0.7),
    )
        .prop_map(|(from, changes, together)| Made {
            from,
            changes,
            together,
        });
    prop::collection::vec(made, 1..30)
}

/// Stores a history in as many calls as it says, and returns each group with the model's state.
async fn store_history(store: &Store, history: &[Made]) -> Vec<(StateGroup, StateMap)> {
    let mut stored: Vec<StateGroup> = Vec::new();
    let mut states: Vec<StateMap> = Vec::new();
    let mut batch: Vec<NewStateGroup> = Vec::new();
    for made in history {
        if !made.together {
            stored.extend(store.store_state_groups(&batch).await.unwrap());
            batch.clear();
        }
        let from = made
            .from
            .filter(|_| !states.is_empty())
            .map(|index| index.index(states.len()));
        let previous = from.map(|from| match stored.get(from) {
            Some(id) => PreviousGroup::Stored(*id),
            None => PreviousGroup::Earlier(from - stored.len()),
        });
        let changes: StateDelta = made
            .changes
            .iter()
            .map(|(kind, key, event)| {
                let key = StateKey::new(&format!("t{kind}"), &key.to_string());
                (key, event.map(|event| format!("${event}").into()))
            })
            .collect();
        let mut state = from.map(|from| states[from].clone()).unwrap_or_default();
        for (key, event) in &changes {
            match event {
                Some(event) => state.insert(key.clone(), event.clone()),
                None => state.remove(key),
            };
        }
        states.push(state);
        batch.push(group(ROOM, previous, changes));
    }
    stored.extend(store.store_state_groups(&batch).await.unwrap());
    stored.into_iter().zip(states).collect()
}

on_both_engines! {
    async fn any_history_is_read_as_a_plain_model_says(db: TestDatabase) {
        let store = db.store("one").await;
        let handle = tokio::runtime::Handle::current();
        let run = move || {
            let mut runner = TestRunner::new(ProptestConfig { cases: 40, failure_persistence: None, ..Default::default() });
            runner.run(&history(), |history| handle.block_on(async {
                let cache = StateGroups::default();
                for (group, model) in store_history(&store, &history).await {
                    for filter in [
                        StateFilter::All,
                        StateFilter::Types(vec!["t0".into(), "t2".into(), "none".into()]),
                        StateFilter::Types(vec![]),
                        StateFilter::Keys(vec![StateKey::new("t0", "1"), StateKey::new("t1", "0"), StateKey::new("x", "")]),
                    ] {
                        prop_assert_eq!(store.group_state(group, &filter).await.unwrap(), filter.of(&model));
                        prop_assert_eq!(cache.part(&store, group, &filter).await.unwrap(), filter.of(&model));
                    }
                    prop_assert_eq!(&*cache.state(&store, group).await.unwrap(), &model);
                    let warm = StateFilter::Types(vec!["t1".into()]);
                    prop_assert_eq!(cache.part(&store, group, &warm).await.unwrap(), warm.of(&model));
                }
                Ok(())
            })).unwrap();
        };
        tokio::task::spawn_blocking(run).await.unwrap();
    }

    async fn a_chain_is_cut_before_it_grows_too_long(db: TestDatabase) {
        let store = db.store("one").await;
        let mut model = StateMap::new();
        let mut newest = None;
        // One by one, and then all in one call.
        for number in 0..150 {
            let changes = StateDelta::from([set("t", &(number % 7).to_string(), &format!("${number}"))]);
            map::apply(&mut model, &changes);
            newest = Some(store_one(&store, newest, changes).await);
        }
        let batch: Vec<NewStateGroup> = (150..400_usize)
            .map(|number| {
                let changes = StateDelta::from([set("t", &(number % 7).to_string(), &format!("${number}"))]);
                map::apply(&mut model, &changes);
                let previous = match number {
                    150 => PreviousGroup::Stored(newest.unwrap()),
                    _ => PreviousGroup::Earlier(number - 151),
                };
                group(ROOM, Some(previous), changes)
            })
            .collect();
        let ids = store.store_state_groups(&batch).await.unwrap();
        assert!(ids.is_sorted() && ids[0] > newest.unwrap());
        assert_eq!(store.group_state(*ids.last().unwrap(), &StateFilter::All).await.unwrap(), model);

        let full = "SELECT id FROM state_groups WHERE id NOT IN (SELECT state_group FROM state_group_edges) ORDER BY 1";
        let full: Vec<i64> = db.rows(full).await.iter().map(|row| row.trim_matches(['(', ')']).parse().unwrap()).collect();
        let apart: Vec<i64> = full.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(apart, [MAX_HOPS + 1; 3]);
        assert_eq!(db.rows("SELECT count(*) FROM state_groups").await, ["(400)"]);
        assert_eq!(
            db.rows("SELECT count(*) FROM state_groups_state").await,
            [format!("({})", 400 - full.len() + 1 + 7 * (full.len() - 1))],
            "a full copy holds all, any other group what it changes"
        );
    }

    async fn several_writers_come_to_different_ids(db: TestDatabase) {
        let room = |writer: usize| format!("!{writer}:us.example");
        let writers: Vec<_> = [db.store("one").await, db.connect("two").await, db.connect("three").await]
            .into_iter()
            .cycle()
            .take(12)
            .enumerate()
            .map(|(writer, store)| tokio::spawn(async move {
                let mut made = Vec::new();
                for round in 0..10 {
                    let event = format!("${writer}-{round}");
                    let previous = made.last().copied().map(PreviousGroup::Stored);
                    let changes = |key| StateDelta::from([set("t", key, &event)]);
                    let groups = [
                        group(&room(writer), previous, changes("a")),
                        group(&room(writer), Some(PreviousGroup::Earlier(0)), changes("b")),
                    ];
                    made.extend(store.store_state_groups(&groups).await.unwrap());
                }
                let state = store.group_state(*made.last().unwrap(), &StateFilter::All).await.unwrap();
                let expected = [set("t", "a", &format!("${writer}-9")), set("t", "b", &format!("${writer}-9"))];
                assert_eq!(state, expected.into_iter().map(|(key, event)| (key, event.unwrap())).collect());
                made
            }))
            .collect();
        let mut all = BTreeSet::new();
        for writer in writers {
            all.extend(writer.await.unwrap());
        }
        assert_eq!(all.len(), 12 * 20);
    }

    async fn a_group_that_cannot_be_is_refused_and_nothing_of_its_call_stays(db: TestDatabase) {
        let store = db.store("one").await;
        let there = store_one(&store, None, StateDelta::from([set("t", "", "$1")])).await;
        let sound = || group(ROOM, None, StateDelta::new());
        for wrong in [
            group("!other", Some(PreviousGroup::Stored(there)), StateDelta::new()),
            group(ROOM, Some(PreviousGroup::Stored(StateGroup(there.0 + 1000))), StateDelta::new()),
            group(ROOM, Some(PreviousGroup::Earlier(1)), StateDelta::new()),
        ] {
            let refused = store.store_state_groups(&[sound(), wrong]).await;
            assert!(matches!(refused, Err(StoreError::Damaged { .. })), "{refused:?}");
        }
        assert_eq!(db.rows("SELECT count(*) FROM state_groups").await, ["(1)"]);
        assert!(store.store_state_groups(&[]).await.unwrap().is_empty());
        assert!(store.group_state(StateGroup(there.0 + 500), &StateFilter::All).await.is_err());
        // An empty state is a state.
        let empty = store_one(&store, Some(there), StateDelta::from([(StateKey::new("t", ""), None)])).await;
        assert!(store.group_state(empty, &StateFilter::All).await.unwrap().is_empty());
    }

    async fn what_is_known_of_events_is_found(db: TestDatabase) {
        let store = db.store("one").await;
        db.room(ROOM).await;
        for (ordering, id) in [(1, "$a"), (2, "$b"), (3, "$outlier")] {
            db.event(&database::Event::new(id, ROOM, "@a:us.example", ordering)).await;
        }
        db.run("INSERT INTO event_to_state_groups (event_id, state_group) VALUES ('$a', 7), ('$b', 8);
                INSERT INTO rejections (event_id, reason, last_check) VALUES ('$b', 'r', '')").await;
        let ids: Vec<EventId> = ["$a", "$b", "$outlier", "$none"].map(EventId::from).to_vec();
        let groups: BTreeMap<_, _> = store.groups_after(&ids).await.unwrap().into_iter().collect();
        assert_eq!(groups, BTreeMap::from([("$a".into(), StateGroup(7)), ("$b".into(), StateGroup(8))]));
        let mut events = store.events_json(&ids).await.unwrap();
        events.sort_by_key(|event| event.event_id.clone());
        assert_eq!(events.iter().map(|event| (event.event_id.as_str(), event.rejected)).collect::<Vec<_>>(),
                   [("$a", false), ("$b", true), ("$outlier", false)]);
        assert!(events.iter().all(|event| event.json.contains("origin_server_ts")));
    }
}

#[tokio::test]
async fn the_sequence_is_set_where_synapse_never_ran_and_nowhere_else() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store("one").await;
    db.run("INSERT INTO state_groups (id, room_id, event_id) VALUES (500, '!room:us.example', '$e')")
        .await;
    store.begin_state_group_ids().await.unwrap();
    let behind = group(ROOM, Some(PreviousGroup::Stored(StateGroup(500))), StateDelta::new());
    let refused = store.store_state_groups(std::slice::from_ref(&behind)).await;
    assert!(
        matches!(&refused, Err(StoreError::Incompatible(text)) if text.contains("state_group_id_seq")),
        "a live Synapse's sequence is not touched: {refused:?}"
    );
    db.run("ALTER TABLE schema_version RENAME TO elsewhere").await;
    store.begin_state_group_ids().await.unwrap();
    assert_eq!(store.store_state_groups(&[behind]).await.unwrap(), [StateGroup(501)]);
    db.run("DELETE FROM state_groups WHERE id > 100").await;
    store.begin_state_group_ids().await.unwrap();
    assert_eq!(
        store_one(&store, None, StateDelta::new()).await,
        StateGroup(502),
        "never back"
    );
}

/// Synapse's own store at work on the database.
fn synapse(python: &str, db: &TestDatabase, question: &Json) -> Json {
    let server = db.server();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let key = "ed25519 a_test AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8\n";
    std::fs::write(file("signing.key"), key).unwrap();
    let config = json!({
        "server_name": US, "report_stats": false, "listeners": [], "signing_key_path": file("signing.key"),
        "media_store_path": file("media"), "macaroon_secret_key": "m", "form_secret": "f",
        "trusted_key_servers": [], "suppress_key_server_warning": true,
        "database": {"name": "psycopg2", "args": {
            "host": server.host, "port": server.port, "user": server.user, "database": server.name,
            "cp_min": 1, "cp_max": 3,
        }},
    });
    std::fs::write(file("hs.yaml"), config.to_string()).unwrap();
    let mut process = Command::new(python)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/synapse_groups.py"))
        .arg(file("hs.yaml"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    serde_json::to_writer(process.stdin.take().unwrap(), question).unwrap();
    let output = process.wait_with_output().unwrap();
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).unwrap()
}

fn listed(state: &StateMap) -> Json {
    state
        .iter()
        .map(|(key, event)| json!([&*key.kind, &*key.key, event.as_str()]))
        .collect()
}

/// A room with 1,000 members, and 200 changes of it: members leave and return, the topic changes.
fn large_history() -> Vec<StateDelta> {
    let member = |n: usize, event: String| set("m.room.member", &format!("@u{n}:s{}.example", n % 50), &event);
    let mut first: StateDelta = (0..1000).map(|n| member(n, format!("$join{n}"))).collect();
    first.extend([set("m.room.create", "", "$create"), set("m.room.topic", "", "$topic")]);
    let later = (0..200).map(|change| {
        let topic = set("m.room.topic", "", &format!("$topic{change}"));
        let moved = member(change * 37 % 1000, format!("$moved{change}"));
        StateDelta::from([if change % 10 == 0 { topic } else { moved }])
    });
    std::iter::once(first).chain(later).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn synapse_reads_our_groups_and_we_read_its() {
    let Some(db) = TestDatabase::new().await else { return };
    let Ok(python) = std::env::var("BURDOCK_TEST_SYNAPSE") else {
        eprintln!("skipped: BURDOCK_TEST_SYNAPSE is not set");
        return;
    };
    let store = db.store("one").await;
    let history = large_history();
    let mut states = vec![StateMap::new()];
    for changes in &history {
        let mut state = states.last().unwrap().clone();
        map::apply(&mut state, changes);
        states.push(state);
    }
    let states: Vec<Arc<StateMap>> = states.into_iter().skip(1).map(Arc::new).collect();

    let previous = |number: usize| number.checked_sub(1).map(PreviousGroup::Earlier);
    let groups: Vec<NewStateGroup> = history
        .iter()
        .enumerate()
        .map(|(number, changes)| group(ROOM, previous(number), changes.clone()))
        .collect();
    let ours = store.store_state_groups(&groups).await.unwrap();
    // Only every tenth is compared, because each is a thousand entries.
    let some = || (0..states.len()).step_by(10);
    let write: Vec<Json> = history
        .iter()
        .enumerate()
        .map(|(number, changes)| {
            let entry = |(key, event): (&StateKey, &Option<EventId>)| {
                json!([&*key.kind, &*key.key, event.as_ref().unwrap().as_str()])
            };
            let delta: Vec<Json> = changes.iter().map(entry).collect();
            json!({"room": "!theirs:us.example", "event": "$for", "previous": number.checked_sub(1), "delta": delta})
        })
        .collect();
    let question = json!({"write": write, "read": some().map(|number| ours[number].0).collect::<Vec<_>>()});
    let answer = tokio::task::block_in_place(|| synapse(&python, &db, &question));
    let written: Vec<i64> = serde_json::from_value(answer["written"].clone()).unwrap();
    assert!(
        written.iter().min() > ours.iter().map(|id| id.0).max().as_ref(),
        "one sequence"
    );
    for number in some() {
        let read = |group: i64| &answer["read"][group.to_string()];
        assert_eq!(
            *read(ours[number].0),
            listed(&states[number]),
            "Synapse reads our group {number}"
        );
        let theirs = StateGroup(written[number]);
        assert_eq!(
            store.group_state(theirs, &StateFilter::All).await.unwrap(),
            *states[number]
        );
        let topics = StateFilter::Types(vec!["m.room.topic".into(), "m.room.create".into()]);
        assert_eq!(
            store.group_state(theirs, &topics).await.unwrap(),
            topics.of(&states[number])
        );
    }
}
