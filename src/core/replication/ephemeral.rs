//! What is in no database, presence and typing, as tables that others follow.

use std::{fmt, sync::Arc};

use serde_json::Value;

use super::{
    feed::{Bell, MemoryTable, Record, Table},
    rows::PresenceRow,
};
use crate::core::{clock::Millis, id::RoomId};

/// Rows of each table. Whoever follows it keeps as many.
pub const EPHEMERAL_KEPT: usize = 100_000;

/// A row of `typing`: who types in a room. Nobody: there is no row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypingRow {
    /// The room.
    pub room_id: RoomId,
    /// Their user ids.
    pub users: Vec<String>,
}

impl Record for TypingRow {
    const TABLE: &'static str = "typing";
    const COLUMNS: &'static [&'static str] = &["room_id", "user_ids", "deleted"];
    const KEY_COLUMNS: usize = 1;
    type Key = RoomId;

    fn key(&self) -> RoomId {
        self.room_id.clone()
    }

    fn cells(&self) -> Vec<Value> {
        vec![self.room_id.as_str().into(), self.users.clone().into()]
    }
}

impl Record for PresenceRow {
    const TABLE: &'static str = "presence";
    const COLUMNS: &'static [&'static str] = &[
        "user_id",
        "state",
        "last_active_ts",
        "last_federation_update_ts",
        "last_user_sync_ts",
        "status_msg",
        "currently_active",
        "deleted",
    ];
    const KEY_COLUMNS: usize = 1;
    type Key = String;

    fn key(&self) -> String {
        self.user_id.clone()
    }

    fn cells(&self) -> Vec<Value> {
        vec![
            self.user_id.as_str().into(),
            self.state.as_str().into(),
            self.last_active.0.into(),
            self.last_federation_update.0.into(),
            self.last_user_sync.0.into(),
            self.status_msg.as_deref().into(),
            self.currently_active.into(),
        ]
    }
}

/// The two tables.
pub(super) struct EphemeralTables {
    typing: Arc<MemoryTable<TypingRow>>,
    presence: Arc<MemoryTable<PresenceRow>>,
}

impl EphemeralTables {
    /// Those of a process that started at `started`.
    pub fn new(started: Millis, bell: &Bell) -> Self {
        Self {
            typing: Arc::new(MemoryTable::newest(EPHEMERAL_KEPT, started, bell.clone())),
            presence: Arc::new(MemoryTable::newest(EPHEMERAL_KEPT, started, bell.clone())),
        }
    }

    pub fn typing(&self, room_id: &RoomId, users: &[String]) {
        if users.is_empty() {
            self.typing.remove(room_id);
        } else {
            self.typing.put(TypingRow {
                room_id: room_id.clone(),
                users: users.to_vec(),
            });
        }
    }

    pub fn presence(&self, row: &PresenceRow) {
        self.presence.put(row.clone());
    }

    pub fn all(&self) -> [Arc<dyn Table>; 2] {
        [self.presence.clone(), self.typing.clone()]
    }
}

impl fmt::Debug for EphemeralTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EphemeralTables").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::core::replication::feed::Feed;

    #[tokio::test]
    async fn a_user_has_one_row_and_a_room_where_nobody_types_has_none() {
        let bell = Bell::default();
        let tables = EphemeralTables::new(Millis(1), &bell);
        let feed = Feed::new(bell, tables.all().into());
        let room = RoomId::from("!r");
        let online = PresenceRow {
            user_id: "@ann:hs1.test".to_owned(),
            state: "online".to_owned(),
            last_active: Millis(1),
            last_federation_update: Millis(2),
            last_user_sync: Millis(3),
            status_msg: None,
            currently_active: true,
        };
        tables.presence(&online);
        tables.presence(&PresenceRow {
            status_msg: Some("lunch".to_owned()),
            currently_active: false,
            ..online
        });
        tables.typing(&room, &["@ann:hs1.test".to_owned()]);
        let ask = async |parameters: [(&str, &str); 2]| {
            let request = feed.read(parameters).expect("a good question");
            let answer = feed.ask(&request, &CancellationToken::new()).await.expect("an answer");
            serde_json::from_str::<Value>(&answer).expect("JSON")
        };
        let answer = ask([("presence", "1000"), ("typing", "1000")]).await;
        let ann = json!(["@ann:hs1.test", "online", 1, 2, 3, "lunch", false, false]);
        assert_eq!((&answer["presence"][1], &answer["presence"][2]), (&ann, &Value::Null));
        assert_eq!(answer["typing"][1], json!(["!r", ["@ann:hs1.test"], false]));
        tables.typing(&room, &[]);
        let answer = ask([("presence", "1002"), ("typing", "1001")]).await;
        assert_eq!(
            answer,
            json!({"typing": [["typing", 1002, 1, 3, "room_id", "user_ids", "deleted"], ["!r", null, true]]})
        );
    }
}
