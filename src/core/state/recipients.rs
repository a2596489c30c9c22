//! Which servers get an event: those in the room in the state *before* it, so that the ban or leave of a server's last user
//! still reaches that server.
//!
//! No state resolution is needed. Synapse stores the state after each event. That is the state before, except under the event's own
//! key; and only a membership event's key decides who is in the room. What stood there before is named by the event itself
//! (`unsigned.replaces_state`).

use super::joined_hosts::JoinedHosts;
use crate::core::{
    id::{EventId, ServerName, StateGroup, domain_of},
    store::{Store, StoreError, StoredEvent},
};

/// What the event's JSON says that decides who gets it.
#[derive(Debug, Clone, Copy)]
pub struct EventFacts<'a> {
    /// It names previous events: it is not the room's first.
    pub has_prev_events: bool,
    /// Its `auth_events`.
    pub auth_events: &'a [EventId],
    /// `unsigned.replaces_state`.
    pub replaces_state: Option<&'a EventId>,
    /// `content.membership`.
    pub membership: Option<&'a str>,
}

/// Why an event's recipients are not known.
#[derive(Debug, thiserror::Error)]
pub enum RecipientsError {
    /// The room's state at the event is still being completed, and the servers to make do with are gone already. Ask
    /// again shortly.
    #[error("the state at the event is not complete yet")]
    NotYet,
    /// What is stored of the event cannot be right.
    #[error("event {event_id}: {what}")]
    Damaged {
        /// The event.
        event_id: EventId,
        /// What is wrong.
        what: &'static str,
    },
    /// The database did not answer, or is damaged at the state before the event.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Whether the event is for us to send at all, and not for the server it came from or for nobody.
#[must_use]
pub fn is_ours_to_send(event: &StoredEvent, our_server: &ServerName) -> bool {
    let ours = domain_of(&event.sender) == Some(our_server.as_str()) || event.send_on_behalf_of.is_some();
    ours && !event.out_of_band && event.proactively_send
}

/// The servers that get the event, in name order, without ours and without the one it is sent on behalf of.
///
/// # Errors
/// See [`RecipientsError`].
pub async fn recipients(
    store: &Store,
    cache: &JoinedHosts,
    event: &StoredEvent,
    facts: EventFacts<'_>,
) -> Result<Vec<ServerName>, RecipientsError> {
    if !facts.has_prev_events {
        return Ok(Vec::new());
    }
    let excluded =
        |server: &ServerName| server == store.server_name() || Some(server) == event.send_on_behalf_of.as_ref();
    let member = member_event(event, facts).filter(|member| !excluded(&member.server));
    let past = match &member {
        Some(member) => member_past(store, event, member).await?,
        None => Past::default(),
    };

    let (mut hosts, target_joined) = match state_after(store, event).await? {
        // The list is of before the join that is being completed, and is all there is to go by.
        After::Partial(servers) => (servers, false),
        After::Group(group) => {
            let after = cache.of(store, &event.room_id, group).await?;
            let mut hosts: Vec<ServerName> = after.iter().cloned().collect();
            let target_joined = member.as_ref().is_some_and(|member| {
                let others = after
                    .users(member.server.as_str())
                    .saturating_sub(u32::from(member.joins));
                if others == 0 {
                    hosts.retain(|server| *server != member.server);
                }
                others > 0 || past.was_joined
            });
            (hosts, target_joined)
        }
    };
    hosts.retain(|server| !excluded(server));
    if let Some(member) = member
        && (target_joined || past.invite_rescinded)
        && let Err(place) = hosts.binary_search(&member.server)
    {
        hosts.insert(place, member.server);
    }
    Ok(hosts)
}

/// The state after an event.
enum After {
    Group(StateGroup),
    /// Not complete; these servers are known to be in the room.
    Partial(Vec<ServerName>),
}

async fn state_after(store: &Store, event: &StoredEvent) -> Result<After, RecipientsError> {
    let mut group = event.state_group;
    if event.partial_state {
        let mut servers = store.partial_room_servers(&event.room_id).await?;
        if !servers.is_empty() {
            servers.sort_unstable();
            return Ok(After::Partial(servers));
        }
        // The list goes when the room is complete: the event was read before that, so look at it afresh.
        group = match store.event_state(&event.event_id).await? {
            Some((_, true)) => return Err(RecipientsError::NotYet),
            Some((group, false)) => Some(group),
            None => None,
        };
    }
    group.map(After::Group).ok_or_else(|| RecipientsError::Damaged {
        event_id: event.event_id.clone(),
        what: "it has no state group",
    })
}

/// A membership event, as far as it moves its target's server in or out of the room.
struct Member<'a> {
    server: ServerName,
    /// It joins its target.
    joins: bool,
    /// The membership event that stood in its place.
    replaces: Option<&'a EventId>,
    /// If it might take back an invite: where the invite would be named.
    invites: &'a [EventId],
}

fn member_event<'a>(event: &StoredEvent, facts: EventFacts<'a>) -> Option<Member<'a>> {
    let user = event.state_key.as_deref().filter(|_| event.kind == "m.room.member")?;
    let rescinds = facts.membership == Some("leave") && event.sender != user;
    Some(Member {
        server: domain_of(user)?.into(),
        joins: facts.membership == Some("join"),
        replaces: facts.replaces_state,
        invites: if rescinds { facts.auth_events } else { &[] },
    })
}

/// What a membership event's target was before it.
#[derive(Default)]
struct Past {
    was_joined: bool,
    /// It was invited, and the event takes that back: its server is told, though never in the room.
    invite_rescinded: bool,
}

async fn member_past(store: &Store, event: &StoredEvent, member: &Member<'_>) -> Result<Past, RecipientsError> {
    let ids: Vec<&EventId> = member.invites.iter().chain(member.replaces).collect();
    if ids.is_empty() {
        return Ok(Past::default());
    }
    let known = store.memberships(&ids).await?;
    let invite_rescinded = known.iter().any(|(id, user, membership)| {
        member.invites.contains(id) && Some(user) == event.state_key.as_ref() && membership == "invite"
    });
    let was_joined = match member.replaces {
        None => false,
        Some(replaced) => known
            .iter()
            .find_map(|(id, _, membership)| (id == replaced).then_some(membership == "join"))
            .ok_or_else(|| RecipientsError::Damaged {
                event_id: event.event_id.clone(),
                what: "the membership it replaces is not known",
            })?,
    };
    Ok(Past {
        was_joined,
        invite_rescinded,
    })
}
