//! The sticky backlog: how rows are recorded, what is read from them, and how they move under concurrent changes.

#[macro_use]
#[path = "support/database.rs"]
mod database;

use burdock::core::{
    clock::Millis,
    id::{EventId, RoomId, ServerName, StickyPosition, StreamOrdering},
    store::{BacklogItem, BacklogRow, NewServer},
};
use database::{Event, TestDatabase};

const ANN: &str = "@ann:us.example";
const NOW: Millis = Millis(100_000);
const ALIVE: i64 = NOW.0 + 1;
const EXPIRED: i64 = NOW.0;

fn new_server(server: &str, room: &str) -> NewServer {
    NewServer {
        server: ServerName::from(server),
        room_id: RoomId::from(room),
    }
}

fn missed(server: &str, room: &str, position: i64) -> (ServerName, RoomId, StickyPosition) {
    (ServerName::from(server), RoomId::from(room), StickyPosition(position))
}

/// Room `!a` with sticky events of ours at 2 (expired), 3 and 5, and a foreign one at 4.
async fn room_with_sticky_events(db: &TestDatabase) {
    db.room("!a").await;
    db.sticky(&Event::new("$2", "!a", ANN, 12), 2, EXPIRED).await;
    db.sticky(&Event::new("$3", "!a", ANN, 13), 3, ALIVE).await;
    db.sticky(&Event::new("$4", "!a", "@eve:them.example", 14), 4, ALIVE)
        .await;
    db.sticky(&Event::new("$5", "!a", ANN, 15), 5, ALIVE).await;
}

on_both_engines! {
async fn a_new_server_is_owed_all_that_is_alive(db: TestDatabase) {
    let store = db.store("fed1").await;
    room_with_sticky_events(&db).await;
    db.room("!nothing of ours").await;
    db.sticky(&Event::new("$6", "!nothing of ours", "@eve:them.example", 16), 6, ALIVE)
        .await;
    db.sticky(&Event::new("$7", "!purged", ANN, 17), 7, ALIVE).await;

    let rows = ["!nothing of ours", "!a", "!purged", "!a"].map(|room| new_server("new.example", room));
    let recorded = store.record_new_servers(&rows, StreamOrdering(20), NOW).await;
    assert_eq!(recorded, Ok(vec![new_server("new.example", "!a")]));
    assert_eq!(db.backlog().await, ["new.example !a 3"]);
    assert_eq!(
        db.rows("SELECT instance_name, event_cursor, delta_cursor FROM burdock.instances")
            .await,
        ["(fed1,,20)"]
    );

    // Higher stays as low as it was, lower is lowered, and both are told.
    for (before, after) in [(1, 1), (9, 3)] {
        let before =
            format!("UPDATE destination_rooms_sticky_events_backlog SET sticky_events_stream_position = {before}");
        db.run(&before).await;
        let recorded = store.record_new_servers(&rows[1..2], StreamOrdering(21), NOW).await;
        assert_eq!(recorded, Ok(vec![new_server("new.example", "!a")]));
        assert_eq!(db.backlog().await, [format!("new.example !a {after}")]);
    }
    // The cursor moves also when nobody is new.
    assert_eq!(store.record_new_servers(&[], StreamOrdering(30), NOW).await, Ok(vec![]));
    assert_eq!(
        db.rows("SELECT instance_name, event_cursor, delta_cursor FROM burdock.instances")
            .await,
        ["(fed1,,30)"]
    );
}
}

on_both_engines! {
async fn an_event_that_raced_with_a_join_is_recorded(db: TestDatabase) {
    let store = db.store("fed1").await;
    room_with_sticky_events(&db).await;
    let rows = [
        missed("b.example", "!a", 5),
        missed("b.example", "!a", 3),
        missed("a.example", "!a", 5),
        missed("a", "!gone", 5),
    ];
    store.record_missed(&rows).await.unwrap();
    assert_eq!(db.backlog().await, ["a.example !a 5", "b.example !a 3"]);
    store
        .record_missed(&[missed("b.example", "!a", 4), missed("a.example", "!a", 4)])
        .await
        .unwrap();
    assert_eq!(db.backlog().await, ["a.example !a 4", "b.example !a 3"]);
    store.record_missed(&[]).await.unwrap();

    let asked: Vec<EventId> = ["$2", "$3", "$4", "$unknown"].map(EventId::from).to_vec();
    let found = store.sticky_positions(&asked).await.unwrap();
    assert_eq!(
        found,
        [("$2".into(), StickyPosition(2)), ("$3".into(), StickyPosition(3))].into()
    );
}
}

on_both_engines! {
async fn the_backlog_lists_what_is_alive_and_forgets_the_rest(db: TestDatabase) {
    let store = db.store("fed1").await;
    room_with_sticky_events(&db).await;
    for room in ["!drained", "!foreign"] {
        db.room(room).await;
    }
    db.sticky(&Event::new("$8", "!drained", ANN, 18), 8, ALIVE).await;
    db.sticky(&Event::new("$9", "!foreign", "@eve:them.example", 19), 9, ALIVE)
        .await;
    db.run(
        "INSERT INTO destination_rooms_sticky_events_backlog \
         VALUES ('d', '!a', 5), ('d', '!drained', 9), ('d', '!foreign', 2), ('other', '!drained', 9)",
    )
    .await;
    let row = |recent_join: Option<&str>| BacklogRow {
        room_id: "!a".into(),
        position: StickyPosition(5),
        recent_join: recent_join.map(EventId::from),
    };
    let d = ServerName::from("d");
    assert_eq!(store.backlog(&d, NOW).await, Ok(vec![row(None)]));
    assert_eq!(db.backlog().await, ["d !a 5", "other !drained 9"]);

    // Joins: of another server, gone again, long ago, lately, and the newest.
    let recently = NOW.0 - 59_999;
    let member = |id, sender, ordering, received_ts| Event {
        received_ts,
        ..Event::new(id, "!a", sender, ordering)
    };
    db.member(&member("$m1", "@x:not.d", 30, recently), "join").await;
    db.member(&member("$m2", "@left:d", 31, recently), "leave").await;
    db.member(&member("$m3", "@old:d", 32, recently - 1), "join").await;
    assert_eq!(store.backlog(&d, NOW).await, Ok(vec![row(None)]));
    db.member(&member("$m4", "@b:d", 33, recently), "join").await;
    db.member(&member("$m5", "@a:d", 34, recently), "join").await;
    assert_eq!(store.backlog(&d, NOW).await, Ok(vec![row(Some("$m5"))]));

    assert_eq!(store.backlog(&d, Millis(ALIVE)).await, Ok(vec![]));
    assert_eq!(db.backlog().await, ["other !drained 9"]);
}
}

/// Sticky events of ours: the id, its internal metadata, the SQL that befalls it, and whether it may still be sent.
const CASES: [(&str, &str, &str, bool); 16] = [
    ("$plain", "{}", "", true),
    ("$soft", r#"{"soft_failed": true}"#, "", false),
    ("$revived", r#"{"soft_failed": false}"#, "", true),
    (
        "$rejected",
        "{}",
        "INSERT INTO rejections VALUES ('$rejected', '', '')",
        false,
    ),
    (
        "$unread",
        "{}",
        "DELETE FROM event_json WHERE event_id = '$unread'; DELETE FROM events WHERE event_id = '$unread'",
        false,
    ),
    (
        "$outlier",
        "{}",
        "UPDATE events SET outlier = true WHERE event_id = '$outlier'",
        false,
    ),
    (
        "$known",
        "{}",
        "INSERT INTO redactions VALUES ('$absent', '$known', false, 0, false)",
        false,
    ),
    (
        "$unconfirmed",
        "{}",
        "INSERT INTO redactions VALUES ('$absent2', '$unconfirmed', false, 0, true)",
        true,
    ),
    (
        "$by us",
        "{}",
        "INSERT INTO redactions VALUES ('$r us', '$by us', false, 0, true)",
        false,
    ),
    (
        "$by power",
        "{}",
        "INSERT INTO redactions VALUES ('$r power', '$by power', false, 0, true)",
        false,
    ),
    (
        "$by stranger",
        "{}",
        "INSERT INTO redactions VALUES ('$r stranger', '$by stranger', false, 0, true)",
        true,
    ),
    (
        "$elsewhere",
        "{}",
        "INSERT INTO redactions VALUES ('$r other room', '$elsewhere', false, 0, true)",
        true,
    ),
    (
        "$refused",
        "{}",
        "INSERT INTO redactions VALUES ('$r rejected', '$refused', false, 0, true);
                            INSERT INTO rejections VALUES ('$r rejected', '', '')",
        true,
    ),
    (
        "$erased",
        "{}",
        "UPDATE sticky_events SET sender = '@gone:us.example' WHERE event_id = '$erased';
                           INSERT INTO erased_users VALUES ('@gone:us.example')",
        false,
    ),
    (
        "$banned",
        "{}",
        "UPDATE sticky_events SET sender = '@bad:us.example' WHERE event_id = '$banned';
                           INSERT INTO room_ban_redactions VALUES ('!a', '@bad:us.example', '$r us', NULL)",
        false,
    ),
    (
        "$returned",
        "{}",
        "UPDATE sticky_events SET sender = '@back:us.example' WHERE event_id = '$returned';
                             INSERT INTO room_ban_redactions VALUES ('!a', '@back:us.example', '$r us', 1)",
        true,
    ),
];

on_both_engines! {
async fn what_may_not_be_sent_is_marked(db: TestDatabase) {
    let store = db.store("fed1").await;
    room_with_sticky_events(&db).await;
    db.room("!b").await;
    let mut expected = vec![(3, "$3", true), (5, "$5", true)];
    let mut position = 10;
    let recheck = r#"{"recheck_redaction": true}"#;
    db.event(&Event {
        metadata: recheck,
        ..Event::new("$r us", "!a", ANN, 1)
    })
    .await;
    db.event(&Event::new("$r power", "!a", "@mod:them.example", 2)).await;
    db.event(&Event {
        metadata: recheck,
        ..Event::new("$r stranger", "!a", "@eve:them.example", 3)
    })
    .await;
    db.event(&Event::new("$r other room", "!b", ANN, 4)).await;
    db.event(&Event::new("$r rejected", "!a", ANN, 5)).await;
    for (id, metadata, sql, sendable) in CASES {
        // An embedded homeserver has no bans that redact.
        if sql.contains("room_ban_redactions") && db.pick(false, true) {
            continue;
        }
        db.sticky(
            &Event {
                metadata,
                ..Event::new(id, "!a", ANN, 100 + i64::from(position))
            },
            position,
            ALIVE,
        )
        .await;
        db.run(sql).await;
        expected.push((i64::from(position), id, sendable));
        position += 1;
    }
    let expected: Vec<BacklogItem> = expected
        .into_iter()
        .map(|(position, id, sendable)| BacklogItem {
            position: StickyPosition(position),
            event_id: id.into(),
            sendable,
        })
        .collect();
    let (d, room) = (ServerName::from("d"), RoomId::from("!a"));
    let page = store
        .backlog_items(&d, &room, StickyPosition(0), NOW, 50)
        .await
        .unwrap();
    assert_eq!(page.items, expected);
    assert!(!page.joined);
    db.member(&Event::new("$join", "!a", "@x:d", 50), "join").await;
    let page = store.backlog_items(&d, &room, StickyPosition(4), NOW, 2).await.unwrap();
    assert_eq!(page.items, expected[1..3]);
    assert!(page.joined);
}
}

#[tokio::test]
async fn a_server_is_in_a_room_by_its_members_or_by_the_partial_list() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store("fed1").await;
    for room in ["!a", "!partial"] {
        db.room(room).await;
    }
    db.member(&Event::new("$1", "!a", "@x:joined.example:8448", 1), "join")
        .await;
    db.member(&Event::new("$2", "!a", "@x:invited.example", 2), "invite")
        .await;
    db.run(
        "INSERT INTO partial_state_rooms (room_id) VALUES ('!partial');
         INSERT INTO partial_state_rooms_servers VALUES ('!partial', 'listed.example')",
    )
    .await;
    for (server, room, expected) in [
        ("joined.example:8448", "!a", true),
        ("joined.example", "!a", false),
        ("invited.example", "!a", false),
        ("joined.example:8448", "!partial", false),
        ("listed.example", "!partial", true),
        ("listed.example", "!a", false),
    ] {
        let found = store.server_in_room(&server.into(), &room.into()).await;
        assert_eq!(found, Ok(expected), "{server} in {room}");
    }
}

on_both_engines! {
async fn a_row_moves_only_from_where_it_was_read(db: TestDatabase) {
    let store = db.store("fed1").await;
    room_with_sticky_events(&db).await;
    let (d, room) = (ServerName::from("d"), RoomId::from("!a"));
    let advance = |from, to| store.advance_backlog(&d, &room, StickyPosition(from), StickyPosition(to));
    assert_eq!(advance(3, 4).await, Ok(false));
    store.record_missed(&[missed("d", "!a", 3)]).await.unwrap();
    assert_eq!(advance(3, 6).await, Ok(true));
    assert_eq!(advance(3, 7).await, Ok(false));
    // A lower one is recorded while 6 to 8 is on the wire.
    store.record_missed(&[missed("d", "!a", 5)]).await.unwrap();
    assert_eq!(advance(6, 9).await, Ok(false));
    assert_eq!(db.backlog().await, ["d !a 5"]);
    // Synapse's column has 32 bits.
    let beyond = i64::from(i32::MAX) + 1;
    let stored = db.pick(i64::from(i32::MAX), beyond);
    assert_eq!(advance(5, beyond).await, Ok(true));
    assert_eq!(db.backlog().await, [format!("d !a {stored}")]);
    // The room is purged.
    db.run("DELETE FROM rooms").await;
    assert_eq!(
        (advance(stored, 1).await, db.backlog().await),
        (Ok(false), vec![])
    );
}
}

#[tokio::test]
async fn a_lower_position_recorded_during_the_move_wins() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store("fed1").await;
    room_with_sticky_events(&db).await;
    let (d, room) = (ServerName::from("d"), RoomId::from("!a"));
    store.record_missed(&[missed("d", "!a", 5)]).await.unwrap();
    let mut other = db.pool().begin().await.unwrap();
    sqlx::query("UPDATE destination_rooms_sticky_events_backlog SET sticky_events_stream_position = 3")
        .execute(&mut *other)
        .await
        .unwrap();
    let commit = async {
        db.until_waiting().await;
        other.commit().await.unwrap();
    };
    let (moved, ()) = tokio::join!(
        store.advance_backlog(&d, &room, StickyPosition(5), StickyPosition(6)),
        commit
    );
    assert_eq!((moved, db.backlog().await), (Ok(false), vec!["d !a 3".to_owned()]));
}

on_both_engines! {
async fn a_row_is_dropped_only_while_its_server_is_gone(db: TestDatabase) {
    let store = db.store("fed1").await;
    room_with_sticky_events(&db).await;
    let (d, room) = (ServerName::from("d"), RoomId::from("!a"));
    store.record_missed(&[missed("d", "!a", 3)]).await.unwrap();
    assert_eq!(store.drop_backlog(&d, &room, StickyPosition(4)).await, Ok(false));
    db.member(&Event::new("$join", "!a", "@x:d", 50), "join").await;
    assert_eq!(store.drop_backlog(&d, &room, StickyPosition(3)).await, Ok(false));
    db.member(&Event::new("$leave", "!a", "@x:d", 51), "leave").await;
    assert_eq!(store.drop_backlog(&d, &room, StickyPosition(3)).await, Ok(true));
    assert_eq!(db.backlog().await, Vec::<String>::new());
}
}

#[tokio::test]
async fn a_row_written_again_during_its_deletion_stays() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store("fed1").await;
    room_with_sticky_events(&db).await;
    let d = ServerName::from("d");
    store.record_missed(&[missed("d", "!a", 6)]).await.unwrap();
    // A sticky event and the row for it commit while the row is being deleted as drained. Its position is unchanged.
    let mut other = db.pool().begin().await.unwrap();
    sqlx::raw_sql(
        "INSERT INTO sticky_events VALUES (7, 'master', '$7', '!a', 17, '@ann:us.example', 999999);
         UPDATE destination_rooms_sticky_events_backlog SET sticky_events_stream_position = 6",
    )
    .execute(&mut *other)
    .await
    .unwrap();
    let commit = async {
        db.until_waiting().await;
        other.commit().await.unwrap();
    };
    let (read, ()) = tokio::join!(store.backlog(&d, NOW), commit);
    assert_eq!((read, db.backlog().await), (Ok(vec![]), vec!["d !a 6".to_owned()]));
    assert_eq!(store.backlog(&d, NOW).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_room_purged_while_it_is_recorded_is_left_out() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store("fed1").await;
    room_with_sticky_events(&db).await;
    let mut purge = db.pool().begin().await.unwrap();
    sqlx::query("DELETE FROM rooms").execute(&mut *purge).await.unwrap();
    let commit = async {
        db.until_waiting().await;
        purge.commit().await.unwrap();
    };
    let rows = [new_server("d", "!a")];
    let (recorded, ()) = tokio::join!(store.record_new_servers(&rows, StreamOrdering(9), NOW), commit);
    assert_eq!((recorded, db.backlog().await), (Ok(vec![]), vec![]));
    assert_eq!(
        db.rows("SELECT instance_name, event_cursor, delta_cursor FROM burdock.instances")
            .await,
        ["(fed1,,9)"]
    );
}
