//! Who may work on a room now? One at a time, rooms in parallel; and while we join one, what comes for it waits.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{OwnedMutexGuard, watch},
    time::timeout,
};

use crate::core::id::RoomId;

/// How long what comes for a room waits until our join of it is done.
const JOIN_PATIENCE: Duration = Duration::from_secs(25);

/// Rooms with a lock that nobody holds are forgotten beyond this many.
const MAX_IDLE: usize = 1_000;

/// The rooms that are worked on.
#[derive(Default)]
pub struct Rooms {
    locks: Mutex<HashMap<RoomId, Arc<tokio::sync::Mutex<()>>>>,
    joining: Arc<Mutex<HashMap<RoomId, watch::Receiver<()>>>>,
}

/// The right to add to a room. Dropped, it is the next one's turn.
pub struct RoomLock {
    room: RoomId,
    _guard: OwnedMutexGuard<()>,
}

impl RoomLock {
    /// The room.
    pub fn room(&self) -> &RoomId {
        &self.room
    }
}

/// A join under way. Dropped, it is over, done or not.
pub struct Joining {
    room: RoomId,
    all: Arc<Mutex<HashMap<RoomId, watch::Receiver<()>>>>,
    _over: watch::Sender<()>,
}

impl Drop for Joining {
    fn drop(&mut self) {
        self.all.lock().remove(&self.room);
    }
}

impl Rooms {
    /// Waits until nobody else adds to the room.
    pub async fn lock(&self, room: &RoomId) -> RoomLock {
        let lock = {
            let mut locks = self.locks.lock();
            if locks.len() > MAX_IDLE {
                locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            }
            Arc::clone(locks.entry(room.clone()).or_default())
        };
        RoomLock {
            room: room.clone(),
            _guard: lock.lock_owned().await,
        }
    }

    /// Begins to join a room that we are not in; waits if somebody else does just now.
    pub async fn join(&self, room: &RoomId) -> Joining {
        loop {
            let other = {
                let mut joining = self.joining.lock();
                let Some(other) = joining.get(room) else {
                    let (sender, receiver) = watch::channel(());
                    joining.insert(room.clone(), receiver);
                    return Joining {
                        room: room.clone(),
                        all: Arc::clone(&self.joining),
                        _over: sender,
                    };
                };
                other.clone()
            };
            over(other).await;
        }
    }

    /// Waits until no join of that room is under way. `false`: it takes too long.
    pub async fn settled(&self, room: &RoomId) -> bool {
        let joining = self.joining.lock().get(room).cloned();
        match joining {
            Some(joining) => timeout(JOIN_PATIENCE, over(joining)).await.is_ok(),
            None => true,
        }
    }
}

/// Nothing is ever sent: the end of the sender is the news.
async fn over(mut joining: watch::Receiver<()>) {
    while joining.changed().await.is_ok() {}
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_at_a_time_in_a_room_and_rooms_in_parallel() {
        let rooms = Rooms::default();
        let (a, b) = (RoomId::from("!a"), RoomId::from("!b"));
        let first = rooms.lock(&a).await;
        assert_eq!(first.room(), &a);
        assert!(rooms.lock(&a).now_or_never().is_none());
        assert!(rooms.lock(&b).now_or_never().is_some());
        drop(first);
        assert!(rooms.lock(&a).now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_for_a_room_waits_for_the_join_but_not_for_ever() {
        let rooms = Rooms::default();
        let (a, b) = (RoomId::from("!a"), RoomId::from("!b"));
        assert!(rooms.settled(&a).await);
        let joining = rooms.join(&a).await;
        assert!(rooms.join(&a).now_or_never().is_none(), "somebody joins already");
        assert!(rooms.settled(&b).await);
        assert!(!rooms.settled(&a).await, "in vain");
        let (settled, ()) = tokio::join!(rooms.settled(&a), async {
            tokio::task::yield_now().await;
            drop(joining);
        });
        assert!(settled);
        assert!(rooms.settled(&a).await);
    }
}
