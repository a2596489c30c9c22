//! Whether a server may see an event, by the room's history visibility: asked about extremities that stand in for an
//! event in catch-up.

use serde::Deserialize;

use super::joined_hosts::JoinedHosts;
use crate::core::{
    id::ServerName,
    store::{Store, StoreError, StoredEvent},
};

/// Who may see events sent under it, as far as servers are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HistoryVisibility {
    /// `shared`, `world_readable`, none, or a word we do not know: every server.
    Open,
    /// `joined`: servers with a joined user.
    Joined,
    /// `invited`: servers with a joined or invited user.
    Invited,
}

impl HistoryVisibility {
    /// By the JSON of an `m.room.history_visibility` event.
    fn of_event(json: &str) -> Self {
        #[derive(Deserialize)]
        struct Event {
            content: Content,
        }
        #[derive(Deserialize)]
        struct Content {
            history_visibility: String,
        }
        match serde_json::from_str::<Event>(json)
            .as_ref()
            .map(|event| event.content.history_visibility.as_str())
        {
            Ok("joined") => Self::Joined,
            Ok("invited") => Self::Invited,
            _ => Self::Open,
        }
    }
}

/// Whether users of `server` may see the event, in the state after it. An event without state is open to all.
///
/// # Errors
/// `Damaged` if the state group is; or if the database does not answer.
pub async fn visible_to(
    store: &Store,
    cache: &JoinedHosts,
    event: &StoredEvent,
    server: &ServerName,
) -> Result<bool, StoreError> {
    let Some(group) = event.state_group else {
        return Ok(true);
    };
    let visibility = store
        .state_event(group, "m.room.history_visibility", "")
        .await?
        .map_or(HistoryVisibility::Open, |json| HistoryVisibility::of_event(&json));
    match visibility {
        HistoryVisibility::Open => Ok(true),
        HistoryVisibility::Joined => Ok(cache.of(store, &event.room_id, group).await?.contains(server.as_str())),
        HistoryVisibility::Invited => store.server_has_member(group, server, &["join", "invite"]).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_open() {
        let of = |content: &str| HistoryVisibility::of_event(&format!(r#"{{"content":{content},"type":"x"}}"#));
        assert_eq!(of(r#"{"history_visibility":"joined"}"#), HistoryVisibility::Joined);
        assert_eq!(of(r#"{"history_visibility":"invited"}"#), HistoryVisibility::Invited);
        for open in [
            r#"{"history_visibility":"shared"}"#,
            r#"{"history_visibility":"world_readable"}"#,
            r#"{"history_visibility":"whatever"}"#,
            r#"{"history_visibility":["joined"]}"#,
            "{}",
        ] {
            assert_eq!(of(open), HistoryVisibility::Open, "{open}");
        }
    }
}
