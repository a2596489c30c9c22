//! What the store knows of destinations and writes about them, and where the replication streams stand.

#[macro_use]
#[path = "support/database.rs"]
mod database;

use burdock::core::{
    clock::Millis,
    id::{EventId, InstanceName, RoomId, ServerName, StreamOrdering, Token},
    replication::{gap::CacheInvalidation, stream::Table},
    store::{CacheRow, DestinationRecord, OwedRoom, RetryTimings},
};
use database::{Event, TestDatabase};

const DESTINATIONS: &str = "SELECT * FROM destinations ORDER BY 1";

on_both_engines! {
async fn destinations_are_read_with_what_they_are_owed(db: TestDatabase) {
    let store = db.store("fed1").await;
    for room in ["!a", "!b"] {
        db.room(room).await;
    }
    db.run(
        "INSERT INTO destinations VALUES ('behind', 5, 6, 4, 20), ('null', NULL, NULL, NULL, NULL), \
                                         ('done', 0, 0, NULL, 30);
         INSERT INTO destination_rooms VALUES ('behind', '!a', 30), ('behind', '!b', 10), ('null', '!a', 8), \
                                              ('null', '!b', 9), ('done', '!a', 30);
         INSERT INTO destination_rooms_sticky_events_backlog VALUES ('unknown', '!a', 2)",
    )
    .await;
    let asked: Vec<ServerName> = ["behind", "null", "done", "unknown"].map(ServerName::from).to_vec();
    let found = store.destinations(&asked).await.unwrap();
    assert_eq!(found.len(), 4);
    assert_eq!(
        found["behind"],
        DestinationRecord {
            last_successful: Some(StreamOrdering(20)),
            retry: RetryTimings {
                last_tried: Millis(5),
                interval: 6,
                failing_since: Some(Millis(4))
            },
            owed_from: Some(StreamOrdering(30)),
            owed_up_to: Some(StreamOrdering(30)),
            has_backlog: false,
        }
    );
    let owed_from = Some(StreamOrdering(8));
    assert_eq!(
        found["null"],
        DestinationRecord {
            owed_from,
            owed_up_to: Some(StreamOrdering(9)),
            ..DestinationRecord::default()
        }
    );
    let last_successful = Some(StreamOrdering(30));
    assert_eq!(
        found["done"],
        DestinationRecord {
            last_successful,
            ..DestinationRecord::default()
        }
    );
    assert_eq!(
        found["unknown"],
        DestinationRecord {
            has_backlog: true,
            ..DestinationRecord::default()
        }
    );
}
}

on_both_engines! {
async fn back_off_is_stored_with_its_cache_row(db: TestDatabase) {
    let store = db.store("fed1").await;
    let remote = ServerName::from("remote.example");
    let timings = |last_tried, interval| RetryTimings {
        last_tried: Millis(last_tried),
        interval,
        failing_since: Some(Millis(50)),
    };
    let caches = "SELECT * FROM cache_invalidation_stream_by_instance ORDER BY 1";

    let first = store
        .set_retry(&remote, timings(100, 600), Millis(101))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(db.rows(DESTINATIONS).await, ["(remote.example,100,600,50,)"]);
    let token = first.token.0;
    let keys = db.pick("{remote.example}", r#""[""remote.example""]""#);
    let row = format!("({token},fed1,get_destination_retry_timings,{keys},101)");
    assert_eq!(db.rows(caches).await, [row]);
    let at = Millis(101);
    assert_eq!(
        first,
        CacheRow {
            token: Token(token),
            destination: remote.clone(),
            at,
            writer: "fed1".into()
        }
    );

    // Another process has set it further meanwhile.
    assert_eq!(store.set_retry(&remote, timings(90, 600), Millis(102)).await, Ok(None));
    assert_eq!(store.set_retry(&remote, timings(100, 500), Millis(102)).await, Ok(None));
    assert_eq!(db.rows(caches).await.len(), 1);
    // A longer interval, or a later try.
    assert!(
        store
            .set_retry(&remote, timings(90, 601), Millis(103))
            .await
            .unwrap()
            .is_some()
    );
    let second = store
        .set_retry(&remote, timings(110, 30), Millis(104))
        .await
        .unwrap()
        .unwrap();
    assert!(second.token > first.token);
    assert_eq!(db.rows(DESTINATIONS).await, ["(remote.example,110,30,50,)"]);
    // A reset.
    assert!(
        store
            .set_retry(&remote, RetryTimings::default(), Millis(105))
            .await
            .unwrap()
            .is_some()
    );
    assert_eq!(db.rows(DESTINATIONS).await, ["(remote.example,0,0,,)"]);
    // A row that was never tried.
    db.run("INSERT INTO destinations VALUES ('fresh', NULL, NULL, NULL, 3)")
        .await;
    assert!(
        store
            .set_retry(&"fresh".into(), timings(1, 1), Millis(106))
            .await
            .unwrap()
            .is_some()
    );
    assert_eq!(db.rows(DESTINATIONS).await[0], "(fresh,1,1,50,3)");
}
}

on_both_engines! {
async fn the_scan_finds_who_is_owed_something_and_may_be_tried(db: TestDatabase) {
    let store = db.store("fed1").await;
    db.room("!a").await;
    db.run(
        "INSERT INTO destinations VALUES ('a owed', NULL, NULL, NULL, 4), ('b backing off', 100, 50, 90, 4), \
            ('c due', 100, 40, 90, 4), ('d no interval', 100, NULL, 90, 4), ('e never reached', 0, 0, NULL, NULL), \
            ('f done', 0, 0, NULL, 5), ('g backlog backing off', 100, 50, 90, 5), ('h backlog', 0, 0, NULL, 5);
         INSERT INTO destination_rooms SELECT destination, '!a', 5 FROM destinations;
         INSERT INTO destination_rooms_sticky_events_backlog \
         VALUES ('a owed', '!a', 2), ('g backlog backing off', '!a', 2), ('h backlog', '!a', 2), ('i unknown', '!a', 2)",
    )
    .await;
    let all = [
        "a owed",
        "c due",
        "d no interval",
        "e never reached",
        "h backlog",
        "i unknown",
    ]
    .map(ServerName::from);
    let now = Millis(140);
    assert_eq!(store.due_destinations(None, now, 100, true).await.unwrap(), all);
    assert_eq!(store.due_destinations(None, now, 100, false).await.unwrap(), all[..4]);
    assert_eq!(store.due_destinations(None, now, 2, true).await.unwrap(), all[..2]);
    assert_eq!(
        store.due_destinations(Some(&all[1]), now, 3, true).await.unwrap(),
        all[2..5]
    );
    assert_eq!(store.due_destinations(Some(&all[5]), now, 3, true).await.unwrap(), []);
    // The back-off ends: at 150 they are due.
    assert_eq!(
        store
            .due_destinations(None, Millis(150), 100, true)
            .await
            .unwrap()
            .len(),
        8
    );
}
}

on_both_engines! {
async fn owed_rooms_come_in_order_with_purged_events_marked(db: TestDatabase) {
    let store = db.store("fed1").await;
    for room in ["!a", "!b", "!c"] {
        db.room(room).await;
    }
    db.event(&Event::new("$a", "!a", "@u:us.example", 30)).await;
    db.event(&Event::new("$b", "!b", "@u:us.example", 20)).await;
    db.run(
        "INSERT INTO destinations (destination) VALUES ('d');
         INSERT INTO destination_rooms VALUES ('d', '!a', 30), ('d', '!b', 20), ('d', '!c', 25)",
    )
    .await;
    let room = |room: &str, ordering, event: Option<&str>| OwedRoom {
        room_id: RoomId::from(room),
        stream_ordering: StreamOrdering(ordering),
        event_id: event.map(EventId::from),
    };
    let (d, all) = (
        ServerName::from("d"),
        [
            room("!b", 20, Some("$b")),
            room("!c", 25, None),
            room("!a", 30, Some("$a")),
        ],
    );
    assert_eq!(store.owed_rooms(&d, StreamOrdering(0), 50).await.unwrap(), all);
    assert_eq!(store.owed_rooms(&d, StreamOrdering(20), 1).await.unwrap(), all[1..2]);
}
}

on_both_engines! {
async fn a_catch_up_step_marks_the_sticky_events_it_passed_over(db: TestDatabase) {
    let store = db.store("fed1").await;
    for room in ["!a", "!b", "!done"] {
        db.room(room).await;
    }
    let sticky = [
        ("$before", "!a", 10, 2),
        ("$passed", "!a", 12, 3),
        ("$sent", "!b", 13, 4),
        ("$last", "!b", 20, 5),
        ("$after", "!a", 21, 6),
        ("$of a room not owed", "!done", 15, 7),
    ];
    for (id, room, ordering, position) in sticky {
        db.sticky(&Event::new(id, room, "@u:us.example", ordering), position, 1)
            .await;
    }
    db.sticky(&Event::new("$foreign", "!a", "@u:them.example", 11), 8, 1)
        .await;
    db.run(
        "INSERT INTO destinations VALUES ('d', 0, 0, NULL, 10);
         INSERT INTO destination_rooms VALUES ('d', '!a', 22), ('d', '!b', 20), ('d', '!done', 10);",
    )
    .await;
    let d = ServerName::from("d");
    let (old, new) = (StreamOrdering(10), StreamOrdering(20));
    assert_eq!(
        store
            .finish_catch_up_step(&d, old, new, &[StreamOrdering(13)], true)
            .await,
        Ok(true)
    );
    assert_eq!(db.backlog().await, ["d !a 3", "d !b 5"]);
    assert_eq!(db.rows(DESTINATIONS).await, ["(d,0,0,,20)"]);

    // A lower position that is there already stays; and without the flag only the destination moves.
    db.run("UPDATE destination_rooms_sticky_events_backlog SET sticky_events_stream_position = 1")
        .await;
    assert_eq!(store.finish_catch_up_step(&d, old, new, &[], true).await, Ok(true));
    assert_eq!(db.backlog().await, ["d !a 1", "d !b 1"]);
    db.run("DELETE FROM destination_rooms_sticky_events_backlog").await;
    assert_eq!(
        store
            .finish_catch_up_step(&d, old, StreamOrdering(22), &[], false)
            .await,
        Ok(false)
    );
    assert_eq!(
        (db.backlog().await, db.rows(DESTINATIONS).await),
        (vec![], vec!["(d,0,0,,22)".to_owned()])
    );
}
}

on_both_engines! {
async fn streams_tell_where_they_stand(db: TestDatabase) {
    let store = db.store("fed1").await;
    let tables = [
        Table {
            name: "current_state_delta_stream",
            id: "stream_id",
            instance: "instance_name",
        },
        Table {
            name: "sticky_events",
            id: "stream_id",
            instance: "instance_name",
        },
    ];
    assert_eq!(store.greatest_position(&tables).await, Ok(None));
    db.run(
        "INSERT INTO stream_positions VALUES ('to_device', 'w2', 9), ('to_device', 'w1', 7), ('other', 'w1', 1);
         INSERT INTO current_state_delta_stream (stream_id, room_id, type, state_key, instance_name) \
         VALUES (5, '!a', 't', 'a', 'w1'), (5, '!a', 't', 'b', 'w1'), (6, '!a', 't', 'a', NULL), \
                (4, '!a', 't', 'a', 'w1');
         INSERT INTO sticky_events VALUES (7, 'w2', '$e', '!a', 1, '@u:us', 0)",
    )
    .await;
    let stored = store.stored_positions("to_device").await.unwrap();
    assert_eq!(
        stored,
        [
            (InstanceName::from("w1"), Token(7)),
            (InstanceName::from("w2"), Token(9))
        ]
    );
    assert_eq!(store.greatest_position(&tables).await, Ok(Some(Token(7))));
    let rows = [
        (Some(InstanceName::from("w1")), Token(5)),
        (None, Token(6)),
        (Some("w2".into()), Token(7)),
    ];
    assert_eq!(store.positions_from(&tables, Token(5), 10).await.unwrap(), rows);
    assert_eq!(store.positions_from(&tables, Token(5), 2).await.unwrap(), rows[..2]);
}
}

on_both_engines! {
async fn missed_cache_rows_are_read_by_writer(db: TestDatabase) {
    let store = db.store("fed1").await;
    let (with_null, one) = db.pick(("ARRAY['a', NULL]", "'{b}'"), (r#"'["a",null]'"#, r#"'["b"]'"#));
    db.run(&format!(
        "INSERT INTO cache_invalidation_stream_by_instance VALUES \
            (5, 'master', 'get_destination_retry_timings', {with_null}, 100), \
            (6, 'fed1', 'get_destination_retry_timings', {one}, 100), (7, 'master', 'whole', NULL, NULL), \
            (8, 'master', 'later', NULL, NULL)",
    ))
    .await;
    let row = |token, func: &str, keys: Option<Vec<String>>, at| CacheInvalidation {
        token: Token(token),
        func: func.into(),
        keys,
        at,
    };
    let rows = [
        row(
            5,
            "get_destination_retry_timings",
            Some(vec!["a".into()]),
            Some(Millis(100)),
        ),
        row(7, "whole", None, None),
    ];
    let master = InstanceName::from("master");
    assert_eq!(store.cache_rows(&master, Token(4), Token(7), 100).await.unwrap(), rows);
    assert_eq!(
        store.cache_rows(&master, Token(5), Token(8), 1).await.unwrap(),
        rows[1..]
    );
}
}
