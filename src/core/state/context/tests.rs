//! Contexts over a store that is a map.

use serde_json::json;

use super::*;
use crate::core::{clock::Millis, state::map::apply};

const A: &str = "@a:one";
const B: &str = "@b:two";

/// A room whose events are in memory, with the groups that their contexts asked to be stored.
#[derive(Default)]
struct Memory {
    events: HashMap<EventId, String>,
    after: HashMap<EventId, StateGroup>,
    states: Vec<(NewStateGroup, Arc<StateMap>)>,
}

impl StateReader for Memory {
    async fn groups_after(&self, events: &[EventId]) -> Result<HashMap<EventId, StateGroup>, StoreError> {
        let known = |id: &EventId| Some((id.clone(), *self.after.get(id)?));
        Ok(events.iter().filter_map(known).collect())
    }

    async fn state(&self, group: StateGroup) -> Result<Arc<StateMap>, StoreError> {
        Ok(Arc::clone(&self.states[usize::try_from(group.0).unwrap() - 1].1))
    }

    async fn part(&self, group: StateGroup, filter: &StateFilter) -> Result<StateMap, StoreError> {
        Ok(filter.of(&*self.state(group).await?))
    }

    async fn events_json(&self, events: &[EventId]) -> Result<Vec<EventJson>, StoreError> {
        let json = |id: &EventId| {
            Some(EventJson {
                event_id: id.clone(),
                json: self.events.get(id)?.clone(),
                rejected: false,
            })
        };
        Ok(events.iter().filter_map(json).collect())
    }
}

fn version() -> RoomVersion {
    RoomVersion::of("10").unwrap()
}

/// An event under its short name, in the way of `json!`.
struct Said<'a> {
    id: &'a str,
    sender: &'a str,
    key: Option<(&'a str, &'a str)>,
    content: serde_json::Value,
    prev: &'a [&'a str],
    auth: &'a [&'a str],
    at: i64,
}

impl Memory {
    async fn context(&self, said: &Said<'_>) -> Result<EventContext, ContextError> {
        let prev: Vec<EventId> = said.prev.iter().map(|id| (*id).into()).collect();
        let key = said.key.map(|(kind, key)| StateKey::new(kind, key));
        let arrival = NewArrival {
            event_id: &said.id.into(),
            room_id: &"!r:one".into(),
            version: version(),
            state_key: key.as_ref(),
            prev_events: &prev,
        };
        compute_event_context(self, arrival).await
    }

    fn read(said: &Said<'_>) -> (String, RoomEvent) {
        let mut json = json!({
            "room_id": "!r:one", "sender": said.sender, "type": said.key.map_or("m.room.message", |key| key.0),
            "content": said.content, "prev_events": said.prev, "auth_events": said.auth, "origin_server_ts": said.at,
        });
        if let Some((_, key)) = said.key {
            json["state_key"] = json!(key);
        }
        let read = RoomEvent::read(&said.id.into(), &json.to_string(), false).unwrap();
        (json.to_string(), read)
    }

    /// Stores groups as a database would, and says their ids.
    fn store(&mut self, groups: Vec<NewStateGroup>) -> Vec<StateGroup> {
        let first = self.states.len();
        for group in groups {
            let mut state = match group.previous {
                None => StateMap::new(),
                Some(PreviousGroup::Stored(previous)) => {
                    (*self.states[usize::try_from(previous.0).unwrap() - 1].1).clone()
                }
                Some(PreviousGroup::Earlier(index)) => (*self.states[first + index].1).clone(),
            };
            apply(&mut state, &group.changes);
            self.states.push((group, Arc::new(state)));
        }
        (first..self.states.len())
            .map(|index| StateGroup(i64::try_from(index).unwrap() + 1))
            .collect()
    }

    async fn add(&mut self, said: Said<'_>) -> EventGroups {
        let (json, read) = Self::read(&said);
        let context = self.context(&said).await.unwrap();
        context.before().check_arrival(self, version(), &read).await.unwrap();
        let ids = self.store(context.new_groups());
        let groups = context.groups(&ids);
        self.events.insert(said.id.into(), json);
        self.after.insert(said.id.into(), groups.after.unwrap());
        groups
    }

    /// A room of `A`'s that `B` has joined: `$create`, `$a`, `$levels`, `$rule`, `$b`.
    async fn room() -> Self {
        let mut room = Self::default();
        let state = |id, sender, kind, key, content, prev, auth| Said {
            id,
            sender,
            key: Some((kind, key)),
            content,
            prev,
            auth,
            at: 1,
        };
        let create = json!({"creator": A, "room_version": "10"});
        let first = room
            .add(state("$create", A, "m.room.create", "", create, &[], &[]))
            .await;
        assert_eq!((first.before, first.after), (None, Some(StateGroup(1))));
        let join = json!({"membership": "join"});
        let auth = &["$create"];
        room.add(state("$a", A, "m.room.member", A, join.clone(), &["$create"], auth))
            .await;
        let levels = json!({"users": {A: 100, B: 50}});
        let auth = &["$create", "$a"];
        room.add(state("$levels", A, "m.room.power_levels", "", levels, &["$a"], auth))
            .await;
        let auth = &["$create", "$a", "$levels"];
        let rule = json!({"join_rule": "public"});
        room.add(state("$rule", A, "m.room.join_rules", "", rule, &["$levels"], auth))
            .await;
        let auth = &["$create", "$levels", "$rule"];
        room.add(state("$b", B, "m.room.member", B, join, &["$rule"], auth))
            .await;
        room
    }

    fn state_after(&self, id: &str) -> &StateMap {
        &self.states[usize::try_from(self.after[id].0).unwrap() - 1].1
    }
}

fn topic<'a>(id: &'a str, sender: &'a str, prev: &'a [&'a str], auth: &'a [&'a str], at: i64) -> Said<'a> {
    Said {
        id,
        sender,
        key: Some(("m.room.topic", "")),
        content: json!({"topic": id}),
        prev,
        auth,
        at,
    }
}

const BY_A: &[&str] = &["$create", "$a", "$levels"];
const BY_B: &[&str] = &["$create", "$b", "$levels"];

fn message<'a>(id: &'a str, prev: &'a [&'a str]) -> Said<'a> {
    Said {
        key: None,
        ..topic(id, A, prev, BY_A, 9)
    }
}

#[tokio::test]
async fn a_message_shares_the_group_before_it_and_a_state_event_makes_one() {
    let mut room = Memory::room().await;
    let before = room.after["$b"];
    let groups = room.add(message("$m", &["$b"])).await;
    assert_eq!((groups.before, groups.after), (Some(before), Some(before)));

    let context = room.context(&topic("$t", A, &["$m"], BY_A, 2)).await.unwrap();
    let change = context.change().unwrap();
    assert_eq!((&*change.key.kind, &change.replaces), ("m.room.topic", &None));
    let [made] = &context.new_groups()[..] else {
        panic!("one group")
    };
    assert_eq!(
        (made.previous, made.changes.len()),
        (Some(PreviousGroup::Stored(before)), 1)
    );

    room.add(topic("$t", A, &["$m"], BY_A, 2)).await;
    let mut again = room.context(&topic("$t2", A, &["$t"], BY_A, 2)).await.unwrap();
    assert_eq!(again.change().unwrap().replaces, Some("$t".into()));
    again.reject();
    assert!(
        again.new_groups().is_empty(),
        "a rejected event leaves the state as it is"
    );
    let group = Some(room.after["$t"]);
    assert_eq!(
        again.groups(&[]),
        EventGroups {
            before: group,
            after: group
        }
    );
}

#[tokio::test]
async fn where_the_room_forked_the_states_are_resolved_and_stored_once() {
    let mut room = Memory::room().await;
    room.add(topic("$t1", A, &["$b"], BY_A, 5)).await;
    room.add(topic("$t2", B, &["$b"], BY_B, 7)).await;
    // The later of two topics counts, whatever comes first in the list: that is the state of a group that is there.
    for prev in [["$t1", "$t2"], ["$t2", "$t1"]] {
        let context = room.context(&message("$m", &prev)).await.unwrap();
        assert_eq!(*context.before(), StateBefore::Group(room.after["$t2"]));
    }
    // A bans B, who set a topic at the same time: that is undone, and is in neither group as it then is.
    let ban = Said {
        key: Some(("m.room.member", B)),
        content: json!({"membership": "ban"}),
        ..topic("$ban", A, &["$t1"], &["$create", "$a", "$levels", "$b"], 6)
    };
    room.add(ban).await;
    let name = Said {
        key: Some(("m.room.name", "")),
        content: json!({"name": "n"}),
        ..topic("$name", A, &["$t2"], BY_A, 8)
    };
    room.add(name).await;
    let count = room.states.len();
    let groups = room.add(topic("$t3", A, &["$name", "$ban"], BY_A, 9)).await;
    assert_eq!(
        room.states.len(),
        count + 2,
        "the resolved state and that after the event"
    );
    assert_ne!(groups.before, groups.after);
    let before = &room.states[count].1;
    let at = |kind, key| before.get(&StateKey::new(kind, key)).map(EventId::as_str);
    assert_eq!(at("m.room.member", B), Some("$ban"));
    assert_eq!(at("m.room.topic", ""), Some("$t1"));
    assert_eq!(at("m.room.name", ""), Some("$name"));
    assert_eq!(
        room.state_after("$t3")[&StateKey::new("m.room.topic", "")].as_str(),
        "$t3"
    );
}

#[tokio::test]
async fn what_is_not_allowed_or_follows_something_unknown_is_said() {
    let room = Memory::room().await;
    let unknown = room.context(&message("$m", &["$b", "$x", "$y"])).await;
    assert!(matches!(unknown, Err(ContextError::UnknownPrevious(ids)) if ids == ["$x".into(), "$y".into()]));

    let levels = Said {
        key: Some(("m.room.power_levels", "")),
        content: json!({"users": {A: 100, B: 100}}),
        ..topic("$l", B, &["$b"], BY_B, 3)
    };
    let context = room.context(&levels).await.unwrap();
    let (_, read) = Memory::read(&levels);
    let before = context.before();
    let forbidden = |found: Result<(), ContextError>, why: &str| {
        assert!(
            matches!(&found, Err(ContextError::Rules(RulesError::Forbidden(text))) if text.contains(why)),
            "{found:?}"
        );
    };
    forbidden(before.auth_check(&room, version(), &read).await, "power");
    forbidden(before.check_arrival(&room, version(), &read).await, "power");
    // Allowed in the state before it, but it names other events than it should.
    for (auth, why) in [
        (&["$create", "$levels"][..], "membership"),
        (&["$create", "$a", "$levels", "$b"], "unexpected"),
        (&["$create", "$a", "$levels", "$lost"], "failed to find"),
    ] {
        let said = Said {
            auth,
            ..message("$m", &["$b"])
        };
        let (_, read) = Memory::read(&said);
        before.auth_check(&room, version(), &read).await.unwrap();
        forbidden(before.check_arrival(&room, version(), &read).await, why);
    }
}

#[tokio::test]
async fn the_auth_events_of_a_new_event_are_chosen_from_the_state_before_it() {
    let room = Memory::room().await;
    let invite = NewEvent {
        room_id: None,
        kind: "m.room.member",
        state_key: Some("@c:three"),
        sender: A,
        content: r#"{"membership":"invite","third_party_invite":{"signed":{"token":"x"}}}"#,
        origin_server_ts: Millis(1),
        depth: 1,
        prev_events: &[],
        auth_events: &[],
        more: &[],
    };
    let before = StateBefore::Group(room.after["$b"]);
    let chosen = before.auth_events(&room, version(), &invite).await.unwrap();
    assert_eq!(
        chosen,
        ["$create", "$rule", "$a", "$levels"].map(EventId::from),
        "by their keys"
    );
}
