//! Which of this process's clients ask for news, and what does the process that handles presence hear of it?
//!
//! A clean stop says `CLEAR_USER_SYNC`, so that nobody waits for the time-out. While clients ask on and on, one of them is
//! named again every minute, or a quiet process would be taken for one that crashed.

use std::collections::BTreeMap;

use crate::core::{
    clock::Millis,
    replication::command::{Command, Device, InstanceId},
};

/// Between signs of life, ms. A fifth of the time-out.
const REMIND_EVERY: i64 = 60_000;

/// Where presence is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// In this process: nobody else is told.
    Here,
    /// In another.
    Elsewhere,
}

/// The clients that ask this process for news. One client may do so several times at once.
#[derive(Debug)]
pub struct SyncReports {
    me: InstanceId,
    presence: Presence,
    syncing: BTreeMap<Device, (usize, Millis)>,
    last_said: Option<Millis>,
}

impl SyncReports {
    /// Nobody yet.
    #[must_use]
    pub fn new(me: InstanceId, presence: Presence) -> Self {
        Self {
            me,
            presence,
            syncing: BTreeMap::new(),
            last_said: None,
        }
    }

    /// A client begins to ask. `now` is the wall clock's.
    pub fn started(&mut self, device: Device, now: Millis) -> Option<Command> {
        let (count, last_sync) = self.syncing.entry(device.clone()).or_default();
        *count += 1;
        *last_sync = now;
        (*count == 1).then(|| self.say(device, true, now, now)).flatten()
    }

    /// It has its answer.
    pub fn ended(&mut self, device: Device, now: Millis) -> Option<Command> {
        let (count, last_sync) = self.syncing.get_mut(&device)?;
        *count -= 1;
        *last_sync = now;
        if *count > 0 {
            return None;
        }
        self.syncing.remove(&device);
        self.say(device, false, now, now)
    }

    /// A connection stands: all are named.
    pub fn connected(&mut self, now: Millis) -> Vec<Command> {
        let all: Vec<_> = self
            .syncing
            .iter()
            .map(|(device, (_, at))| (device.clone(), *at))
            .collect();
        let commands = all.into_iter();
        commands
            .filter_map(|(device, at)| self.say(device, true, at, now))
            .collect()
    }

    /// When [`Self::remind`] has something to say.
    #[must_use]
    pub fn wake_at(&self) -> Option<Millis> {
        let said = self.last_said.filter(|_| !self.syncing.is_empty())?;
        Some(said.plus(REMIND_EVERY))
    }

    /// Time passed.
    pub fn remind(&mut self, now: Millis) -> Option<Command> {
        self.wake_at().filter(|at| *at <= now)?;
        let (device, (_, last_sync)) = self.syncing.first_key_value()?;
        let (device, last_sync) = (device.clone(), *last_sync);
        self.say(device, true, last_sync, now)
    }

    /// The process stops.
    #[must_use]
    pub fn stopping(&self) -> Option<Command> {
        let elsewhere = self.presence == Presence::Elsewhere;
        elsewhere.then(|| Command::ClearUserSync(self.me.clone()))
    }

    fn say(&mut self, device: Device, syncing: bool, last_sync: Millis, now: Millis) -> Option<Command> {
        if self.presence == Presence::Here {
            return None;
        }
        self.last_said = Some(now);
        Some(Command::UserSync {
            instance: self.me.clone(),
            device,
            syncing,
            last_sync,
        })
    }
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::StdRng};

    use super::*;

    fn phone() -> Device {
        Device {
            user_id: "@ann:example.com".to_owned(),
            device_id: Some("PHONE".to_owned()),
        }
    }

    fn text(command: Option<Command>) -> Option<String> {
        Some(command?.to_string().split_once(' ')?.1.split_once(' ')?.1.to_owned())
    }

    #[test]
    fn only_the_first_and_the_last_of_a_client_are_told_and_a_quiet_process_shows_that_it_lives() {
        let me = InstanceId::draw(&mut StdRng::seed_from_u64(1));
        assert_eq!(me.to_string().len(), 5);
        let mut reports = SyncReports::new(me.clone(), Presence::Elsewhere);
        assert_eq!(reports.wake_at(), None);
        let start = |at| Some(format!("@ann:example.com PHONE start {at}"));
        assert_eq!(text(reports.started(phone(), Millis(1_000))), start(1_000));
        assert_eq!(text(reports.started(phone(), Millis(2_000))), None);
        assert_eq!(text(reports.ended(phone(), Millis(3_000))), None);
        assert!(reports.remind(Millis(60_999)).is_none());
        assert_eq!(reports.wake_at(), Some(Millis(61_000)));
        assert_eq!(text(reports.remind(Millis(61_000))), start(3_000));
        let again: Vec<_> = reports
            .connected(Millis(62_000))
            .into_iter()
            .map(|c| text(Some(c)))
            .collect();
        assert_eq!(again, [start(3_000)]);
        assert_eq!(reports.wake_at(), Some(Millis(122_000)));
        let end = Some("@ann:example.com PHONE end 63000".to_owned());
        assert_eq!(text(reports.ended(phone(), Millis(63_000))), end);
        assert!(reports.ended(phone(), Millis(63_000)).is_none());
        assert_eq!(reports.wake_at(), None);
        assert_eq!(reports.stopping().unwrap().to_string(), format!("CLEAR_USER_SYNC {me}"));
    }

    #[test]
    fn the_process_that_handles_presence_tells_nobody() {
        let mut reports = SyncReports::new(InstanceId::draw(&mut StdRng::seed_from_u64(1)), Presence::Here);
        assert!(reports.started(phone(), Millis(1)).is_none());
        assert!(reports.connected(Millis(2)).is_empty());
        assert!(reports.remind(Millis(900_000)).is_none());
        assert!(reports.ended(phone(), Millis(3)).is_none());
        assert!(reports.stopping().is_none());
    }
}
