//! The embedded homeserver's database: what its writing half stores, and that it shares the file with the sender's process.

#[macro_use]
#[path = "support/database.rs"]
mod database;

use std::collections::BTreeMap;

use burdock::core::{
    clock::Millis,
    id::{EventId, InstanceName, RoomId, ServerName, StateGroup, StickyPosition, StreamOrdering},
    store::{
        APPLICATION_ID, Checkpoint, Known, NewServer, Outcome, PersistEvent, Persisted, RemoteKey, RetryTimings,
        Sqlite, StateChange, Store, StoreError,
    },
};
use database::{Event, TestDatabase, US};
use serde_json::Map;

const NOW: Millis = Millis(1_000);
const ANN: &str = "@ann:us.example";
const ROOM: &str = "!room";

async fn master(db: &TestDatabase) -> Sqlite {
    Sqlite::open(&db.path(), InstanceName::from("master"), ServerName::from(US))
        .await
        .expect("the file can be opened")
}

fn ids(ids: &[&str]) -> Vec<EventId> {
    ids.iter().map(|id| EventId::from(*id)).collect()
}

/// A message of Ann's after the events `prev`.
fn message(id: &str, prev: &[&str], depth: i64) -> PersistEvent {
    PersistEvent {
        event_id: id.into(),
        room_id: ROOM.into(),
        kind: "m.room.message".into(),
        state_key: None,
        sender: ANN.into(),
        depth,
        sent: NOW,
        json: "{}".into(),
        format_version: 3,
        metadata: Map::new(),
        prev_events: ids(prev),
        auth_events: Vec::new(),
        membership: None,
        redacts: None,
        sticky_until: None,
        outcome: Outcome::Accepted(StateGroup(1)),
    }
}

fn sticky(id: &str, depth: i64, until: i64) -> PersistEvent {
    PersistEvent {
        sticky_until: Some(Millis(until)),
        ..message(id, &[], depth)
    }
}

fn member(id: &str, user: &str, membership: &str) -> PersistEvent {
    PersistEvent {
        kind: "m.room.member".into(),
        state_key: Some(user.into()),
        sender: user.into(),
        membership: Some(membership.into()),
        ..message(id, &[], 1)
    }
}

fn becomes(user: &str, event: Option<&str>) -> StateChange {
    StateChange {
        room_id: ROOM.into(),
        kind: "m.room.member".into(),
        state_key: user.into(),
        event_id: event.map(EventId::from),
    }
}

async fn extremities(db: &TestDatabase) -> Vec<String> {
    db.rows("SELECT event_id FROM event_forward_extremities ORDER BY 1")
        .await
}

#[tokio::test]
async fn events_get_positions_in_order_and_are_read_as_the_sender_reads_them() {
    let db = TestDatabase::embedded().await;
    let master = master(&db).await;
    let room = RoomId::from(ROOM);
    assert_eq!(master.room_version(&room).await, Ok(None));
    assert_eq!(master.create_room(&room, "10", ANN).await, Ok(true));
    assert_eq!(master.create_room(&room, "11", ANN).await, Ok(false));
    for version in ["11", "10"] {
        master.replace_room(&room, version, ANN).await.unwrap();
        assert_eq!(master.room_version(&room).await, Ok(Some(version.to_owned())));
    }
    assert_eq!(master.room_version(&room).await, Ok(Some("10".into())));
    assert_eq!(master.rooms().await, Ok(vec![room]));

    let refused = PersistEvent {
        outcome: Outcome::Rejected(StateGroup(1), "no".into()),
        ..message("$refused", &["$a"], 2)
    };
    let outlier = PersistEvent {
        outcome: Outcome::Outlier,
        ..message("$outlier", &[], 1)
    };
    let soft = PersistEvent {
        outcome: Outcome::SoftFailed(StateGroup(1)),
        ..message("$soft", &["$a"], 2)
    };
    let batch = [
        message("$a", &[], 1),
        refused,
        outlier.clone(),
        soft,
        message("$b", &["$a"], 2),
    ];
    let persisted = master.persist(&batch, &[], NOW).await.unwrap();
    let orderings: Vec<(&str, i64)> = persisted.events.iter().map(|(id, at)| (id.as_str(), at.0)).collect();
    assert_eq!(
        orderings,
        [("$a", 1), ("$refused", 2), ("$outlier", 3), ("$soft", 4), ("$b", 5)]
    );

    let store = Store::Sqlite(master.clone());
    let page = store
        .own_events(StreamOrdering(0), StreamOrdering(5), 10)
        .await
        .unwrap();
    let found: Vec<(&str, bool)> = page
        .events
        .iter()
        .map(|event| (event.event_id.as_str(), event.soft_failed))
        .collect();
    assert_eq!(found, [("$a", false), ("$soft", true), ("$b", false)]);
    assert_eq!(page.events[0].state_group, Some(StateGroup(1)));
    assert_eq!(
        store.stored_positions("events").await.unwrap(),
        [(InstanceName::from("master"), burdock::core::id::Token(5))]
    );

    // What is known is not stored again, but an outlier that has got a place is.
    let now_placed = PersistEvent {
        outcome: Outcome::Accepted(StateGroup(1)),
        ..outlier
    };
    let again = [message("$b", &["$a"], 2), now_placed];
    let persisted = master.persist(&again, &[], NOW).await.unwrap();
    assert_eq!(persisted.events, [("$outlier".into(), StreamOrdering(6))]);
    let asked = ids(&["$a", "$refused", "$outlier", "$missing"]);
    let known = master.known_events(&asked).await.unwrap();
    let expected = [
        ("$a".into(), Known::Placed),
        ("$refused".into(), Known::Rejected),
        ("$outlier".into(), Known::Placed),
    ];
    assert_eq!(known, expected.into());

    // A position is given out once, though its event is deleted.
    db.run("DELETE FROM events WHERE stream_ordering = 6; DELETE FROM event_json WHERE event_id = '$outlier'")
        .await;
    let persisted = master.persist(&[message("$c", &["$b"], 3)], &[], NOW).await.unwrap();
    assert_eq!(persisted.events[0].1, StreamOrdering(7));
}

#[tokio::test]
async fn the_newest_accepted_events_are_the_extremities_in_whatever_order_they_come() {
    let db = TestDatabase::embedded().await;
    let master = master(&db).await;
    let soft = PersistEvent {
        outcome: Outcome::SoftFailed(StateGroup(1)),
        ..message("$soft", &["$a"], 2)
    };
    master.persist(&[message("$a", &[], 1), soft], &[], NOW).await.unwrap();
    assert_eq!(
        extremities(&db).await,
        ["($a)"],
        "nothing is built on a soft-failed event"
    );
    let fork = [message("$b", &["$a"], 2), message("$c", &["$a"], 2)];
    master.persist(&fork, &[], NOW).await.unwrap();
    assert_eq!(extremities(&db).await, ["($b)", "($c)"]);
    // $e came before $d, which it follows.
    let late = [message("$e", &["$b", "$c", "$d"], 4), message("$d", &["$c"], 3)];
    master.persist(&late, &[], NOW).await.unwrap();
    assert_eq!(extremities(&db).await, ["($e)"]);
}

#[tokio::test]
async fn a_change_of_state_commits_with_what_the_new_servers_are_owed() {
    let db = TestDatabase::embedded().await;
    let master = master(&db).await;
    let room = RoomId::from(ROOM);
    master.create_room(&room, "10", ANN).await.unwrap();
    let new = |server: &str| NewServer {
        server: server.into(),
        room_id: ROOM.into(),
    };

    // Our own join: whoever else it lists was there before us.
    let join = [
        member("$ann", ANN, "join"),
        member("$bob", "@bob:old.example", "join"),
        sticky("$expired", 2, NOW.0),
        sticky("$s1", 2, 5_000),
        sticky("$s2", 3, 9_000),
    ];
    let changes = [becomes(ANN, Some("$ann")), becomes("@bob:old.example", Some("$bob"))];
    let persisted = master.persist(&join, &changes, NOW).await.unwrap();
    let positions: Vec<(&str, i64)> = persisted.sticky.iter().map(|(id, at)| (id.as_str(), at.0)).collect();
    assert_eq!(positions, [("$s1", 1), ("$s2", 2)]);
    assert_eq!((persisted.new_servers, db.backlog().await), (vec![], vec![]));

    // Another user of a server that is there, one of a new one, and one who is only invited.
    let joins = [
        member("$eve", "@eve:old.example", "join"),
        member("$cat", "@cat:new.example", "join"),
        member("$dan", "@dan:invited.example", "invite"),
    ];
    let changes = [
        becomes("@eve:old.example", Some("$eve")),
        becomes("@cat:new.example", Some("$cat")),
        becomes("@dan:invited.example", Some("$dan")),
    ];
    let persisted = master.persist(&joins, &changes, NOW).await.unwrap();
    assert_eq!(persisted.new_servers, [new("new.example")]);
    assert_eq!(db.backlog().await, ["new.example !room 1"]);
    assert_eq!(
        db.rows(
            "SELECT stream_id, state_key, event_id, prev_event_id FROM current_state_delta_stream WHERE stream_id > 1"
        )
        .await,
        [
            "(6,@eve:old.example,$eve,)",
            "(6,@cat:new.example,$cat,)",
            "(6,@dan:invited.example,$dan,)"
        ],
        "one change is one position"
    );
    // Nothing changes by saying it again; a change without a new event is refused whole.
    assert_eq!(master.persist(&joins, &changes, NOW).await, Ok(Persisted::default()));
    let refused = master.persist(&[], &[becomes(ANN, None)], NOW).await;
    assert!(matches!(refused, Err(StoreError::Refused(_))), "{refused:?}");

    // It leaves and comes back after the first sticky event has expired: the lower position stays.
    for (id, membership, at) in [("$left", "leave", 4_000), ("$back", "join", 6_000)] {
        let event = [member(id, "@cat:new.example", membership)];
        let persisted = master
            .persist(&event, &[becomes("@cat:new.example", Some(id))], Millis(at))
            .await
            .unwrap();
        assert_eq!(persisted.new_servers.len(), usize::from(membership == "join"));
    }
    assert_eq!(db.backlog().await, ["new.example !room 1"]);
    let state = master.current_state(&room).await.unwrap();
    let key = |user: &str| ("m.room.member".to_owned(), user.to_owned());
    let expected: BTreeMap<_, EventId> = [
        (key(ANN), "$ann".into()),
        (key("@bob:old.example"), "$bob".into()),
        (key("@cat:new.example"), "$back".into()),
        (key("@dan:invited.example"), "$dan".into()),
        (key("@eve:old.example"), "$eve".into()),
    ]
    .into();
    assert_eq!(state, expected);
    let hosts = Store::Sqlite(master.clone()).joined_hosts_now(&room).await.unwrap();
    assert_eq!(
        hosts,
        ["new.example", "old.example", "us.example"].map(ServerName::from)
    );

    // Positions in the sticky stream are not given out again either.
    master.forget_old(Millis(10_000), Millis(0)).await.unwrap();
    assert_eq!(db.rows("SELECT * FROM sticky_events").await, Vec::<String>::new());
    let persisted = master
        .persist(&[sticky("$s3", 4, 20_000)], &[], Millis(10_000))
        .await
        .unwrap();
    assert_eq!(persisted.sticky, [("$s3".into(), StickyPosition(3))]);
}

#[tokio::test]
async fn the_graph_is_walked_within_its_bounds() {
    let db = TestDatabase::embedded().await;
    let master = master(&db).await;
    let room = RoomId::from(ROOM);
    let mut batch = vec![message("$1", &[], 1)];
    for depth in 2..=9_i64 {
        let (id, prev) = (format!("${depth}"), format!("${}", depth - 1));
        batch.push(PersistEvent {
            auth_events: ids(&[&prev, "$1", "$unknown"]),
            ..message(&id, &[&prev], depth)
        });
    }
    batch.push(message("$side", &["$4"], 5));
    batch.push(message("$top", &["$9", "$side"], 10));
    master.persist(&batch, &[], NOW).await.unwrap();

    let between = async |earliest: &[&str], min_depth, limit| {
        let found = master
            .events_between(&room, &ids(earliest), &ids(&["$top"]), min_depth, limit)
            .await
            .unwrap();
        found.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(between(&["$4"], 0, 50).await, ["$5", "$side", "$6", "$7", "$8", "$9"]);
    assert_eq!(between(&["$4"], 0, 2).await, ["$8", "$9"]);
    assert_eq!(between(&[], 8, 50).await, ["$8", "$9"]);
    assert_eq!(between(&["$9", "$side"], 0, 50).await, Vec::<String>::new());
    let elsewhere = master
        .events_between(&"!other".into(), &[], &ids(&["$top"]), 0, 50)
        .await;
    assert_eq!(elsewhere, Ok(vec![]));

    assert_eq!(master.auth_chain(&ids(&["$4"]), 50).await, Ok(ids(&["$1", "$2", "$3"])));
    assert_eq!(
        master.auth_chain(&ids(&["$9"]), 3).await.unwrap().len(),
        2,
        "one is not stored"
    );
}

#[tokio::test]
async fn users_and_keys_are_kept() {
    let db = TestDatabase::embedded().await;
    let master = master(&db).await;
    assert_eq!(master.user_exists(ANN).await, Ok(false));
    assert_eq!(master.create_user(ANN).await, Ok(true));
    assert_eq!(master.create_user(ANN).await, Ok(false));
    assert_eq!(master.user_exists(ANN).await, Ok(true));
    let server = ServerName::from("them.example");
    let key = |id: &str, valid_until| RemoteKey {
        key_id: id.into(),
        key: vec![0, 255],
        valid_until: Millis(valid_until),
    };
    let keys = [key("ed25519:b", 1), key("ed25519:a", 1)];
    master.store_remote_keys(&server, &keys).await.unwrap();
    master.store_remote_keys(&server, &[key("ed25519:b", 2)]).await.unwrap();
    let kept = master.remote_keys(&server).await;
    assert_eq!(kept, Ok(vec![key("ed25519:a", 1), key("ed25519:b", 2)]));
    assert_eq!(master.remote_keys(&"other".into()).await, Ok(vec![]));
}

/// Master and sender are two processes on one file: each has connections of its own here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_write_at_once_and_nothing_is_lost_or_refused() {
    const WRITERS: i64 = 4;
    const ROUNDS: i64 = 15;
    let db = TestDatabase::embedded().await;
    let (master, sender) = (master(&db).await, db.store("fed1").await);
    master.create_room(&ROOM.into(), "10", ANN).await.unwrap();
    sender.adopt_positions(&["fed1".into()]).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let (master, sender) = (master.clone(), sender.clone());
        tasks.spawn(async move {
            for round in 0..ROUNDS {
                let events = ["a", "b"].map(|part| sticky(&format!("${writer}-{round}-{part}"), 1, 1_000_000));
                let persisted = master.persist(&events, &[], NOW).await.unwrap();
                // Both halves of a batch are neighbours: no other writer came between.
                assert_eq!(persisted.events[0].1.0 + 1, persisted.events[1].1.0);
            }
        });
        tasks.spawn(async move {
            for round in 0..ROUNDS {
                let destination = ServerName::from(format!("d{writer}-{round}"));
                let checkpoint = Checkpoint {
                    cursor: StreamOrdering(round),
                    owed: vec![(destination.clone(), ROOM.into(), StreamOrdering(round))],
                    ..Checkpoint::default()
                };
                sender.checkpoint(&checkpoint).await.unwrap();
                let timings = RetryTimings {
                    last_tried: NOW,
                    interval: 1,
                    failing_since: Some(NOW),
                };
                assert!(sender.set_retry(&destination, timings, NOW).await.unwrap().is_some());
                let missed = (destination.clone(), RoomId::from(ROOM), StickyPosition(1));
                sender.record_missed(&[missed]).await.unwrap();
                let room = RoomId::from(ROOM);
                let moved = sender
                    .advance_backlog(&destination, &room, StickyPosition(1), StickyPosition(2))
                    .await;
                assert_eq!(moved, Ok(true));
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    let (events, rounds) = (2 * WRITERS * ROUNDS, WRITERS * ROUNDS);
    for (count, expected) in [
        (
            "SELECT count(*), max(stream_ordering) FROM events",
            format!("({events},{events})"),
        ),
        (
            "SELECT count(*), max(stream_id) FROM sticky_events",
            format!("({events},{events})"),
        ),
        ("SELECT count(*) FROM destination_rooms", format!("({rounds})")),
        (
            "SELECT count(*) FROM destinations WHERE retry_interval = 1",
            format!("({rounds})"),
        ),
        (
            "SELECT count(*), max(stream_id) FROM cache_invalidation_stream_by_instance",
            format!("({rounds},{rounds})"),
        ),
        (
            "SELECT count(*) FROM destination_rooms_sticky_events_backlog WHERE sticky_events_stream_position = 2",
            format!("({rounds})"),
        ),
    ] {
        assert_eq!(db.rows(count).await, [expected], "{count}");
    }
}

#[tokio::test]
async fn a_write_that_waited_for_another_process_sees_what_that_one_wrote() {
    let db = TestDatabase::embedded().await;
    let master = master(&db).await;
    let other = sqlx::SqlitePool::connect(&format!("sqlite://{}", db.path().display()))
        .await
        .unwrap();
    let mut writing = other.begin_with("BEGIN IMMEDIATE").await.unwrap();
    sqlx::query(
        "INSERT INTO events (event_id, room_id, type, sender, depth, outlier, instance_name)
         VALUES ('$a', '!room', 'm.room.message', '@ann:us.example', 1, 0, 'other')",
    )
    .execute(&mut *writing)
    .await
    .unwrap();
    let commit = async {
        // Time for a write that does not wait to look before the commit, and to fail after it.
        for _ in 0..200 {
            assert_eq!(master.known_events(&ids(&["$a"])).await, Ok([].into()));
        }
        writing.commit().await.unwrap();
    };
    let batch = [message("$a", &[], 1), message("$b", &["$a"], 2)];
    let (persisted, ()) = tokio::join!(master.persist(&batch, &[], NOW), commit);
    assert_eq!(persisted.unwrap().events, [("$b".into(), StreamOrdering(2))]);
}

#[tokio::test]
async fn two_instances_cannot_hold_one_lock_and_the_holder_is_named() {
    let db = TestDatabase::embedded().await;
    let (one, twin) = (db.connect("fed/1").await, db.connect("fed/1").await);
    let lock = one.lock_instance().await.unwrap();
    let refused = twin.lock_instance().await.err();
    let holder = format!("process {}", std::process::id());
    assert_eq!(refused, Some(StoreError::AlreadyRunning(holder)));
    assert!(db.path().with_file_name("master.db.fed%2f1.lock").exists());
    drop(lock);
    assert!(twin.lock_instance().await.is_ok());
}

#[tokio::test]
async fn only_a_file_of_ours_is_opened_and_no_other_is_changed() {
    let db = TestDatabase::embedded().await;
    let header = std::fs::read(db.path()).unwrap();
    assert_eq!(
        header[68..72],
        APPLICATION_ID.to_be_bytes(),
        "though the journal is apart"
    );

    let other = db.path().with_file_name("homeserver.db");
    let pool = sqlx::SqlitePool::connect(&format!("sqlite://{}?mode=rwc", other.display()))
        .await
        .unwrap();
    sqlx::raw_sql("CREATE TABLE events (a)").execute(&pool).await.unwrap();
    pool.close().await;
    let before = std::fs::read(&other).unwrap();
    let created = Sqlite::create(&other, "master".into(), US.into()).await;
    assert!(matches!(created, Err(StoreError::Incompatible(_))), "{created:?}");
    assert_eq!(std::fs::read(&other).unwrap(), before);

    let missing = Sqlite::open(&db.path().with_file_name("missing.db"), "master".into(), US.into()).await;
    assert!(matches!(missing, Err(StoreError::Unavailable(_))), "{missing:?}");

    // One of ours is opened again with what it held, and not if a newer program has changed it.
    db.event(&Event::new("$kept", ROOM, ANN, 1)).await;
    let again = Sqlite::create(&db.path(), "master".into(), US.into()).await.unwrap();
    assert_eq!(again.known_events(&ids(&["$kept"])).await.unwrap().len(), 1);
    db.run("PRAGMA user_version = 99").await;
    let newer = Sqlite::create(&db.path(), "master".into(), US.into()).await;
    let Err(StoreError::Incompatible(message)) = newer else {
        panic!("{newer:?}")
    };
    assert!(message.contains("newer Burdock"), "{message}");
    let store = db.connect("fed1").await;
    assert!(matches!(store.check().await, Err(StoreError::Incompatible(_))));
    assert!(matches!(store.migrate().await, Err(StoreError::Incompatible(_))));
}
