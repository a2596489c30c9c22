//! Which servers get an event, and which may see one, on Synapse's schema.

#![expect(dead_code, reason = "the support file is shared")]

#[path = "support/database.rs"]
mod database;
#[path = "support/state_fixture.rs"]
mod state_fixture;

use burdock::core::{
    id::EventId,
    state::{
        joined_hosts::JoinedHosts,
        recipients::{EventFacts, RecipientsError, is_ours_to_send, recipients},
        visibility::visible_to,
    },
    store::StoredEvent,
};
use database::US;
use state_fixture::{Event, Fixture, with_databases, with_synapses_database};

const MEMBER: &str = "m.room.member";
const PLAIN: EventFacts<'_> = EventFacts {
    has_prev_events: true,
    auth_events: &[],
    replaces_state: None,
    membership: None,
};

async fn stored(fixture: &Fixture, event: Event<'_>) -> StoredEvent {
    let id = EventId::from(event.id);
    fixture.event(event).await;
    fixture.store.events_by_id(&[id]).await.unwrap().remove(0)
}

/// Group 1: ann (ours), bob (two), cat (three) joined. Groups 2 to 4 change one member each.
async fn room(fixture: &Fixture) {
    fixture.room("!room").await;
    for (id, user, membership) in [
        ("$ann", "@ann:us.example", "join"),
        ("$bob", "@bob:two", "join"),
        ("$cat", "@cat:three", "join"),
        ("$bob-again", "@bob:two", "join"),
        ("$bob-banned", "@bob:two", "ban"),
        ("$dan-invited", "@dan:four", "invite"),
        ("$dan-refused", "@dan:four", "leave"),
        ("$dan", "@dan:four", "join"),
    ] {
        fixture.membership(id, "!room", user, membership).await;
    }
    let members = [
        (MEMBER, "@ann:us.example", "$ann"),
        (MEMBER, "@bob:two", "$bob"),
        (MEMBER, "@cat:three", "$cat"),
    ];
    fixture.group(1, "!room", None, &members).await;
    fixture
        .group(2, "!room", Some(1), &[(MEMBER, "@bob:two", "$bob-banned")])
        .await;
    fixture
        .group(3, "!room", Some(1), &[(MEMBER, "@dan:four", "$dan-invited")])
        .await;
    fixture
        .group(4, "!room", Some(3), &[(MEMBER, "@dan:four", "$dan-refused")])
        .await;
    fixture
        .group(5, "!room", Some(3), &[(MEMBER, "@dan:four", "$dan")])
        .await;
    fixture
        .group(6, "!room", Some(1), &[(MEMBER, "@bob:two", "$bob-again")])
        .await;
}

fn member<'a>(id: &'a str, ordering: i64, key: &'a str, group: i64) -> Event<'a> {
    Event::new(id, ordering).kind(MEMBER).state_key(key).group(group)
}

async fn to(fixture: &Fixture, cache: &JoinedHosts, event: &StoredEvent, facts: EventFacts<'_>) -> Vec<String> {
    let hosts = recipients(&fixture.store, cache, event, facts).await.unwrap();
    hosts.iter().map(ToString::to_string).collect()
}

#[tokio::test]
async fn an_event_goes_to_the_servers_that_were_there_before_it() {
    with_databases(|fixture| async move {
        room(&fixture).await;
        let cache = JoinedHosts::default();
        let to = async |event: &StoredEvent, facts: EventFacts<'_>| to(&fixture, &cache, event, facts).await;

        let plain = stored(&fixture, Event::new("$1", 1).group(1)).await;
        assert_eq!(to(&plain, PLAIN).await, ["three", "two"]);
        assert!(
            to(
                &plain,
                EventFacts {
                    has_prev_events: false,
                    ..PLAIN
                }
            )
            .await
            .is_empty(),
            "the create event"
        );

        let replaced = EventId::from("$bob");
        let ban = EventFacts {
            replaces_state: Some(&replaced),
            membership: Some("ban"),
            ..PLAIN
        };
        let banned = stored(&fixture, member("$2", 2, "@bob:two", 2)).await;
        assert_eq!(to(&banned, ban).await, ["three", "two"], "the server's last user");
        let after = stored(&fixture, Event::new("$3", 3).group(2)).await;
        assert_eq!(to(&after, PLAIN).await, ["three"]);

        let again = EventFacts {
            replaces_state: Some(&replaced),
            membership: Some("join"),
            ..PLAIN
        };
        let rejoined = stored(&fixture, member("$7", 7, "@bob:two", 6)).await;
        assert_eq!(to(&rejoined, again).await, ["three", "two"], "a change of profile");
        let behalf = StoredEvent {
            send_on_behalf_of: Some("two".into()),
            ..rejoined
        };
        assert_eq!(to(&behalf, again).await, ["three"]);

        let lost = EventId::from("$lost");
        let facts = EventFacts {
            replaces_state: Some(&lost),
            ..ban
        };
        let error = recipients(&fixture.store, &cache, &banned, facts).await.unwrap_err();
        assert!(matches!(error, RecipientsError::Damaged { .. }), "{error}");
        let stateless = StoredEvent {
            state_group: None,
            ..plain
        };
        let error = recipients(&fixture.store, &cache, &stateless, PLAIN).await.unwrap_err();
        assert!(matches!(error, RecipientsError::Damaged { .. }), "{error}");
    })
    .await;
}

#[tokio::test]
async fn an_invite_is_for_those_inside_and_taking_it_back_also_for_the_invited() {
    with_databases(|fixture| async move {
        room(&fixture).await;
        let cache = JoinedHosts::default();
        let to = async |event: &StoredEvent, facts: EventFacts<'_>| to(&fixture, &cache, event, facts).await;

        let invited = stored(&fixture, member("$4", 4, "@dan:four", 3)).await;
        assert_eq!(
            to(
                &invited,
                EventFacts {
                    membership: Some("invite"),
                    ..PLAIN
                }
            )
            .await,
            ["three", "two"]
        );

        let auth = [EventId::from("$dan-invited"), EventId::from("$ann")];
        let invite = &auth[0];
        let facts = EventFacts {
            auth_events: &auth,
            replaces_state: Some(invite),
            membership: Some("leave"),
            ..PLAIN
        };
        let rescinded = stored(&fixture, member("$5", 5, "@dan:four", 4)).await;
        assert_eq!(to(&rescinded, facts).await, ["four", "three", "two"]);
        let refused = StoredEvent {
            sender: "@dan:four".to_owned(),
            ..rescinded
        };
        assert_eq!(to(&refused, facts).await, ["three", "two"], "its own doing");

        let facts = EventFacts {
            replaces_state: Some(invite),
            membership: Some("join"),
            ..PLAIN
        };
        let joined = stored(&fixture, member("$6", 6, "@dan:four", 5)).await;
        assert_eq!(
            to(&joined, facts).await,
            ["three", "two"],
            "it was not there before its join"
        );
    })
    .await;
}

#[tokio::test]
async fn a_warm_cache_needs_no_statement_for_a_message_nor_for_our_own_members() {
    with_databases(|fixture| async move {
        room(&fixture).await;
        let cache = JoinedHosts::default();
        let plain = stored(&fixture, Event::new("$1", 1).group(1)).await;
        recipients(&fixture.store, &cache, &plain, PLAIN).await.unwrap();
        fixture.store.close().await;
        assert_eq!(
            recipients(&fixture.store, &cache, &plain, PLAIN).await.unwrap().len(),
            2
        );
        let replaced = EventId::from("$ann");
        let left = StoredEvent {
            kind: MEMBER.to_owned(),
            state_key: Some("@ann:us.example".to_owned()),
            ..plain
        };
        let facts = EventFacts {
            replaces_state: Some(&replaced),
            membership: Some("leave"),
            ..PLAIN
        };
        assert_eq!(recipients(&fixture.store, &cache, &left, facts).await.unwrap().len(), 2);
    })
    .await;
}

#[tokio::test]
async fn a_room_being_joined_goes_by_the_list_it_was_given() {
    with_synapses_database(|fixture| async move {
        room(&fixture).await;
        let cache = JoinedHosts::default();
        let event = Event::new("$1", 1).group(2);
        fixture.event(event).await;
        fixture
            .run(
                "INSERT INTO partial_state_rooms (room_id) VALUES ('!room');
                 INSERT INTO partial_state_rooms_servers VALUES ('!room', 'two'), ('!room', 'us.example');
                 INSERT INTO partial_state_events VALUES ('!room', '$1')",
            )
            .await;
        let event = fixture.store.events_by_id(&["$1".into()]).await.unwrap().remove(0);
        let hosts = recipients(&fixture.store, &cache, &event, PLAIN).await.unwrap();
        assert_eq!(hosts, ["two".into()], "though group 2 has it banned");

        fixture.run("DELETE FROM partial_state_rooms_servers").await;
        let error = recipients(&fixture.store, &cache, &event, PLAIN).await.unwrap_err();
        assert!(matches!(error, RecipientsError::NotYet), "{error}");
        fixture
            .run("DELETE FROM partial_state_events; UPDATE event_to_state_groups SET state_group = 1")
            .await;
        let hosts = recipients(&fixture.store, &cache, &event, PLAIN).await.unwrap();
        assert_eq!(
            hosts,
            ["three".into(), "two".into()],
            "complete by now, though it was read before"
        );
    })
    .await;
}

#[tokio::test]
async fn what_a_server_may_see_is_up_to_the_rooms_history_visibility() {
    with_databases(|fixture| async move {
        room(&fixture).await;
        let kind = "m.room.history_visibility";
        for (id, ordering, content) in [
            ("$v-joined", 10, r#"{"history_visibility":"joined"}"#),
            ("$v-invited", 11, r#"{"history_visibility":"invited"}"#),
        ] {
            fixture
                .event(Event::new(id, ordering).kind(kind).content(content))
                .await;
        }
        fixture.group(20, "!room", Some(3), &[(kind, "", "$v-joined")]).await;
        fixture.group(21, "!room", Some(3), &[(kind, "", "$v-invited")]).await;
        fixture
            .group(22, "!room", Some(21), &[(MEMBER, "@bob:two", "$bob-banned")])
            .await;
        let cache = JoinedHosts::default();
        let plain = stored(&fixture, Event::new("$1", 1).group(3)).await;
        let sees = async |group: Option<i64>, server: &str| {
            let event = StoredEvent {
                state_group: group.map(burdock::core::id::StateGroup),
                ..plain.clone()
            };
            visible_to(&fixture.store, &cache, &event, &server.into())
                .await
                .unwrap()
        };
        assert!(sees(Some(3), "elsewhere").await, "no visibility set: shared");
        assert!(sees(None, "elsewhere").await, "an outlier");
        for (group, server, expected) in [
            (20, "two", true),
            (20, "four", false),
            (20, "elsewhere", false),
            (21, "two", true),
            (21, "four", true),
            (21, "elsewhere", false),
            (22, "two", false),
        ] {
            assert_eq!(sees(Some(group), server).await, expected, "group {group}, {server}");
        }
    })
    .await;
}

#[tokio::test]
async fn the_flags_of_an_event_say_whether_it_is_ours_to_send() {
    with_databases(|fixture| async move {
        fixture.room("!room").await;
        let own = stored(&fixture, Event::new("$1", 1)).await;
        let ours = US.into();
        assert!(is_ours_to_send(&own, &ours));
        let theirs = StoredEvent {
            sender: "@bob:two".to_owned(),
            ..own.clone()
        };
        assert!(!is_ours_to_send(&theirs, &ours));
        assert!(is_ours_to_send(
            &StoredEvent {
                send_on_behalf_of: Some("two".into()),
                ..theirs
            },
            &ours
        ));
        assert!(!is_ours_to_send(
            &StoredEvent {
                out_of_band: true,
                ..own.clone()
            },
            &ours
        ));
        assert!(!is_ours_to_send(
            &StoredEvent {
                proactively_send: false,
                ..own
            },
            &ours
        ));
    })
    .await;
}
