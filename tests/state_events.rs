//! Events, redactions and extremities as Synapse's tables hold them.

#![expect(dead_code, reason = "the support file is shared")]

#[path = "support/database.rs"]
mod database;
#[path = "support/state_fixture.rs"]
mod state_fixture;

use burdock::core::id::{EventId, StateGroup, StreamOrdering};
use state_fixture::{Event, Fixture, with_databases};

fn ids(ids: &[&str]) -> Vec<EventId> {
    ids.iter().map(|id| EventId::from(*id)).collect()
}

async fn own(fixture: &Fixture, after: i64, up_to: i64, limit: i64) -> (Vec<String>, i64) {
    let page = fixture
        .store
        .own_events(StreamOrdering(after), StreamOrdering(up_to), limit)
        .await
        .unwrap();
    (
        page.events.iter().map(|event| event.event_id.to_string()).collect(),
        page.read_up_to.0,
    )
}

#[tokio::test]
async fn a_page_holds_what_is_ours_or_sent_for_others() {
    with_databases(|fixture| async move {
        fixture.room("!room").await;
        let remote = "@eve:remote.example";
        fixture.event(Event::new("$1", 1).group(7)).await;
        fixture.event(Event::new("$remote", 2).sender(remote)).await;
        let metadata = r#"{"send_on_behalf_of":"remote.example","out_of_band_membership":true,"soft_failed":true}"#;
        fixture
            .event(Event::new("$behalf", 3).sender(remote).metadata(metadata))
            .await;
        // The words alone, or no name behind them, do not make it ours.
        let metadata = r#"{"send_on_behalf_of":null}"#;
        fixture
            .event(Event::new("$null", 4).sender(remote).metadata(metadata))
            .await;
        fixture.event(Event::new("$outlier", 5).outlier()).await;
        fixture.event(Event::new("$rejected", 6)).await;
        fixture
            .run("INSERT INTO rejections VALUES ('$rejected', 'auth_error', '')")
            .await;
        let metadata = r#"{"proactively_send":false}"#;
        fixture.event(Event::new("$2", 7).metadata(metadata)).await;
        fixture
            .event(Event::new("$lookalike", 8).sender("@x:y:us.example"))
            .await;
        // Far away, so that several statements are needed.
        fixture.event(Event::new("$3", 45_000)).await;
        fixture.event(Event::new("$4", 45_001).metadata("[damaged")).await;
        fixture.event(Event::new("$backfilled", -3)).await;

        let named = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(
            own(&fixture, 0, 50_000, 100).await,
            (named(&["$1", "$behalf", "$2", "$3", "$4"]), 50_000)
        );
        assert_eq!(
            own(&fixture, 1, 45_000, 100).await,
            (named(&["$behalf", "$2", "$3"]), 45_000)
        );
        assert_eq!(own(&fixture, 0, 50_000, 2).await, (named(&["$1", "$behalf"]), 3));
        assert_eq!(
            own(&fixture, 3, 50_000, 3).await,
            (named(&["$2", "$3"]), 45_000),
            "one was read and left out"
        );
        assert_eq!(own(&fixture, 7, 7, 3).await, (named(&[]), 7));

        let page = fixture
            .store
            .own_events(StreamOrdering(0), StreamOrdering(10), 10)
            .await
            .unwrap();
        let [first, behalf, last] = &page.events[..] else {
            panic!("{page:?}")
        };
        assert_eq!(
            (first.state_group, first.room_version.as_deref()),
            (Some(StateGroup(7)), Some("10"))
        );
        assert_eq!((first.format_version, first.partial_state), (Some(3), false));
        assert!(first.proactively_send && !first.out_of_band && !first.soft_failed);
        assert_eq!(
            behalf.send_on_behalf_of.as_ref().map(AsRef::as_ref),
            Some("remote.example")
        );
        assert!(behalf.out_of_band && behalf.soft_failed && !last.proactively_send);
    })
    .await;
}

#[tokio::test]
async fn events_come_in_the_order_asked_for_with_their_redactions() {
    with_databases(|fixture| async move {
        fixture.room("!room").await;
        for (ordering, id) in (1..).zip([
            "$plain",
            "$sure",
            "$cross",
            "$same",
            "$unknown",
            "$refused",
            "$elsewhere",
        ]) {
            fixture.event(Event::new(id, ordering)).await;
        }
        fixture
            .event(Event::new("$create", 10).kind("m.room.create").state_key(""))
            .await;
        fixture
            .event(Event::new("$before-ban", 11).sender("@bad:remote.example"))
            .await;
        fixture
            .event(Event::new("$after-ban", 13).sender("@bad:remote.example"))
            .await;
        let redaction = |id, ordering| Event::new(id, ordering).kind("m.room.redaction");
        let strict = r#"{"recheck_redaction":true}"#;
        let theirs = "@mod:remote.example";
        fixture
            .event(redaction("$r-cross", 20).sender(theirs).metadata(strict))
            .await;
        fixture.event(redaction("$r-same", 21).metadata(strict)).await;
        fixture.event(redaction("$r-refused", 22)).await;
        fixture.event(redaction("$r-elsewhere", 23).room("!other")).await;
        fixture.event(redaction("$r-ban", 24)).await;
        fixture
            .run(
                "INSERT INTO rejections VALUES ('$r-refused', 'auth_error', '');
                 INSERT INTO redactions (event_id, redacts, recheck) VALUES
                    ('$not-here', '$sure', false), ('$r-cross', '$cross', true), ('$r-same', '$same', true),
                    ('$gone', '$unknown', true), ('$r-refused', '$refused', true),
                    ('$r-elsewhere', '$elsewhere', true), ('$not-here-2', '$create', false)",
            )
            .await;
        // An embedded homeserver has no bans that redact.
        let bans_redact = fixture.pick(true, false);
        if bans_redact {
            fixture
                .run("INSERT INTO room_ban_redactions VALUES ('!room', '@bad:remote.example', '$r-ban', 12)")
                .await;
        }
        let asked = ids(&[
            "$after-ban",
            "$before-ban",
            "$create",
            "$missing",
            "$r-refused",
            "$elsewhere",
            "$refused",
            "$unknown",
            "$same",
            "$cross",
            "$sure",
            "$plain",
        ]);
        let events = fixture.store.events_by_id(&asked).await.unwrap();
        let found: Vec<(&str, bool)> = events
            .iter()
            .map(|event| (event.event_id.as_str(), event.redacted))
            .collect();
        assert_eq!(
            found,
            [
                ("$after-ban", false),
                ("$before-ban", bans_redact),
                ("$create", false),
                ("$elsewhere", false),
                ("$refused", false),
                ("$unknown", false),
                ("$same", true),
                ("$cross", false),
                ("$sure", true),
                ("$plain", false),
            ]
        );
    })
    .await;
}

#[tokio::test]
async fn a_rooms_newest_events_partial_joins_and_erased_users_are_found() {
    with_databases(|fixture| async move {
        let room = fixture.room("!room").await;
        for (id, ordering) in [("$1", 1), ("$2", 2), ("$3", 3), ("$old", -5)] {
            fixture.event(Event::new(id, ordering).group(ordering)).await;
        }
        fixture
            .run(
                "INSERT INTO event_forward_extremities SELECT event_id, room_id FROM events WHERE event_id <> '$2';
                 INSERT INTO erased_users VALUES ('@gone:us.example')",
            )
            .await;
        let deepest = fixture.store.forward_extremities(&room, 2).await.unwrap();
        assert_eq!(
            deepest,
            [("$3".into(), StreamOrdering(3), 3), ("$1".into(), StreamOrdering(1), 1)]
        );

        let erased = fixture
            .store
            .erased(&["@gone:us.example", "@ann:us.example"])
            .await
            .unwrap();
        assert_eq!(erased.into_iter().collect::<Vec<_>>(), ["@gone:us.example"]);

        assert!(!fixture.store.room_is_partial(&room).await.unwrap());
        // An embedded homeserver makes no partial joins.
        let partial = fixture.pick(true, false);
        if partial {
            fixture
                .run(
                    "INSERT INTO partial_state_rooms (room_id) VALUES ('!room');
                 INSERT INTO partial_state_events VALUES ('!room', '$3')",
                )
                .await;
            assert!(fixture.store.room_is_partial(&room).await.unwrap());
            assert!(fixture.store.events_by_id(&ids(&["$3"])).await.unwrap()[0].partial_state);
        }
        assert_eq!(
            fixture.store.event_state(&"$3".into()).await.unwrap(),
            Some((StateGroup(3), partial))
        );
        assert_eq!(
            fixture.store.event_state(&"$1".into()).await.unwrap(),
            Some((StateGroup(1), false))
        );
        assert_eq!(fixture.store.event_state(&"$missing".into()).await.unwrap(), None);
    })
    .await;
}
