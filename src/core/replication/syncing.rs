//! Whose clients ask for news, by what all processes say? For the process that handles presence.
//!
//! A process that was not heard of for five minutes has crashed: its clients are not counted any more.

use std::collections::{BTreeMap, BTreeSet};

use tracing::warn;

use crate::core::{
    clock::Millis,
    replication::command::{Device, InstanceId},
};

/// After so long a silence a process has crashed, ms.
const CRASHED_AFTER: i64 = 300_000;

/// Processes listened to at most. Ids come from the channel.
const MAX_PROCESSES: usize = 1_000;

/// Clients counted at most, over all processes.
const MAX_CLIENTS: usize = 1_000_000;

/// A user whose clients began or ceased to ask for news.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The first client of this user began.
    Started(String),
    /// The last one ceased.
    Stopped(String),
}

/// Who asks for news, and whom.
#[derive(Debug, Default)]
pub struct Syncing {
    processes: BTreeMap<InstanceId, Process>,
    /// How many clients of each user ask, over all processes. None has 0.
    users: BTreeMap<String, usize>,
    clients: usize,
}

#[derive(Debug)]
struct Process {
    last_heard: Millis,
    devices: BTreeSet<Device>,
}

impl Syncing {
    /// Whether a client of this user asks for news.
    #[must_use]
    pub fn is_syncing(&self, user_id: &str) -> bool {
        self.users.contains_key(user_id)
    }

    /// A `USER_SYNC` was heard (or a client of this process began or ceased). `now` is of a clock that never goes back.
    pub fn heard(&mut self, instance: InstanceId, device: Device, syncing: bool, now: Millis) -> Option<Change> {
        if !self.processes.contains_key(&instance) && self.processes.len() >= MAX_PROCESSES {
            warn!(%instance, "too many processes say whose clients ask for news; ignored");
            return None;
        }
        let process = self.processes.entry(instance).or_insert_with(|| Process {
            last_heard: now,
            devices: BTreeSet::new(),
        });
        process.last_heard = now;
        if !syncing {
            return process
                .devices
                .remove(&device)
                .then(|| self.left(device.user_id))
                .flatten();
        }
        if self.clients >= MAX_CLIENTS {
            warn!("too many clients ask for news; not all count for presence");
            return None;
        }
        if !process.devices.insert(device.clone()) {
            return None;
        }
        self.clients += 1;
        let count = self.users.entry(device.user_id.clone()).or_default();
        *count += 1;
        (*count == 1).then_some(Change::Started(device.user_id))
    }

    /// A `CLEAR_USER_SYNC` was heard.
    pub fn cleared(&mut self, instance: &InstanceId) -> Vec<Change> {
        let devices = self
            .processes
            .remove(instance)
            .into_iter()
            .flat_map(|process| process.devices);
        devices.filter_map(|device| self.left(device.user_id)).collect()
    }

    /// When [`Self::tick`] has something to do.
    #[must_use]
    pub fn wake_at(&self) -> Option<Millis> {
        let heard = self.processes.values().map(|process| process.last_heard).min()?;
        Some(heard.plus(CRASHED_AFTER))
    }

    /// Time passed.
    pub fn tick(&mut self, now: Millis) -> Vec<Change> {
        let crashed = |process: &Process| now.since(process.last_heard) >= CRASHED_AFTER;
        let crashed = self.processes.iter().filter(|(_, process)| crashed(process));
        let crashed: Vec<_> = crashed.map(|(instance, _)| instance.clone()).collect();
        crashed.iter().flat_map(|instance| self.cleared(instance)).collect()
    }

    fn left(&mut self, user_id: String) -> Option<Change> {
        self.clients -= 1;
        let count = self.users.get_mut(&user_id)?;
        *count -= 1;
        if *count > 0 {
            return None;
        }
        self.users.remove(&user_id);
        Some(Change::Stopped(user_id))
    }
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::StdRng};

    use super::*;

    const MINUTE: i64 = 60_000;

    fn device(user: &str, device: &str) -> Device {
        Device {
            user_id: user.to_owned(),
            device_id: Some(device.to_owned()),
        }
    }

    fn instances() -> (InstanceId, InstanceId) {
        let mut rng = StdRng::seed_from_u64(1);
        (InstanceId::draw(&mut rng), InstanceId::draw(&mut rng))
    }

    fn started(user: &str) -> Change {
        Change::Started(user.to_owned())
    }

    fn stopped(user: &str) -> Change {
        Change::Stopped(user.to_owned())
    }

    #[test]
    fn a_user_counts_while_any_client_asks_any_process() {
        let (one, two) = instances();
        let mut syncing = Syncing::default();
        let now = Millis(0);
        assert_eq!(
            syncing.heard(one.clone(), device("@ann", "PHONE"), true, now),
            Some(started("@ann"))
        );
        assert_eq!(
            syncing.heard(one.clone(), device("@ann", "PHONE"), true, now),
            None,
            "said again"
        );
        assert_eq!(syncing.heard(two.clone(), device("@ann", "PC"), true, now), None);
        assert_eq!(syncing.heard(one.clone(), device("@ann", "PHONE"), false, now), None);
        assert_eq!(
            syncing.heard(one, device("@ann", "PHONE"), false, now),
            None,
            "said again"
        );
        assert!(syncing.is_syncing("@ann"));
        assert_eq!(
            syncing.heard(two, device("@ann", "PC"), false, now),
            Some(stopped("@ann"))
        );
        assert!(!syncing.is_syncing("@ann"));
        assert_eq!(syncing.clients, 0);
    }

    #[test]
    fn a_clean_stop_ends_all_of_a_process_at_once_and_a_crash_after_five_minutes() {
        let (clean, crashes) = instances();
        let mut syncing = Syncing::default();
        for user in ["@ann", "@bob"] {
            syncing.heard(clean.clone(), device(user, "A"), true, Millis(0));
        }
        syncing.heard(crashes.clone(), device("@bob", "B"), true, Millis(0));
        syncing.heard(crashes.clone(), device("@eve", "E"), true, Millis(MINUTE));
        assert_eq!(syncing.cleared(&clean), [stopped("@ann")]);
        assert_eq!(syncing.cleared(&clean), []);
        assert_eq!(syncing.wake_at(), Some(Millis(6 * MINUTE)));
        assert_eq!(syncing.tick(Millis(6 * MINUTE - 1)), []);
        assert_eq!(syncing.tick(Millis(6 * MINUTE)), [stopped("@bob"), stopped("@eve")]);
        assert_eq!(syncing.wake_at(), None);
        assert_eq!(syncing.clients, 0);
        let again = syncing.heard(crashes, device("@bob", "B"), true, Millis(7 * MINUTE));
        assert_eq!(again, Some(started("@bob")), "it was only slow");
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut syncing = Syncing::default();
        let mut rng = StdRng::seed_from_u64(2);
        for _ in 0..MAX_PROCESSES + 50 {
            syncing.heard(InstanceId::draw(&mut rng), device("@ann", "A"), true, Millis(0));
        }
        assert!(syncing.processes.len() <= MAX_PROCESSES);
        assert!(syncing.is_syncing("@ann"));
    }
}
