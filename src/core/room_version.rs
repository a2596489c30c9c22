//! What does a room's version decide? The form of its events and what a redaction leaves of them.

/// A room version's rules, as those of one of the numbered versions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct RoomVersion(u8);

/// The form of a room's events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventFormat {
    /// Versions 1 and 2: the event names its id, and references are pairs of id and hashes.
    V1,
    /// Version 3: ids are hashes in standard base64.
    V2,
    /// Versions 4 to 11: ids are hashes in URL-safe base64.
    V3,
    /// Version 12: the room's id is that of its create event, which names no room and is in nobody's `auth_events`.
    V4,
}

impl EventFormat {
    /// `event_json.format_version`.
    #[must_use]
    pub fn number(self) -> i32 {
        match self {
            Self::V1 => 1,
            Self::V2 => 2,
            Self::V3 => 3,
            Self::V4 => 4,
        }
    }
}

impl RoomVersion {
    /// The version of that id; `None` if Synapse 1.163.2 does not know it by default.
    #[must_use]
    pub fn of(id: &str) -> Option<Self> {
        // The named ones change only authorisation, which is no concern of a sender.
        let number = match id {
            "org.matrix.msc3757.10" => 10,
            "org.matrix.msc3757.11" => 11,
            "org.matrix.hydra.11" => 12,
            id if id.starts_with(|c: char| c.is_ascii_digit() && c != '0') => id.parse().ok().filter(|n| *n <= 12)?,
            _ => return None,
        };
        Some(Self(number))
    }

    /// What stands in for a version that was never recorded, as happens for rooms known only by an invite or a knock.
    #[must_use]
    pub fn guessed_from_format(format_version: i32) -> Self {
        match format_version {
            1 => Self(1),
            2 => Self(3),
            _ => Self(5),
        }
    }

    /// The numbered version whose rules it has.
    #[must_use]
    pub fn number(self) -> u8 {
        self.0
    }

    /// The form of its events.
    #[must_use]
    pub fn format(self) -> EventFormat {
        match self.0 {
            ..=2 => EventFormat::V1,
            3 => EventFormat::V2,
            4..=11 => EventFormat::V3,
            12.. => EventFormat::V4,
        }
    }

    /// A redaction keeps `aliases` of `m.room.aliases`.
    #[must_use]
    pub fn redaction_keeps_aliases(self) -> bool {
        self.0 <= 5
    }

    /// A redaction keeps `allow` of `m.room.join_rules`.
    #[must_use]
    pub fn redaction_keeps_allow(self) -> bool {
        self.0 >= 8
    }

    /// A redaction keeps `join_authorised_via_users_server` of `m.room.member`.
    #[must_use]
    pub fn redaction_keeps_join_authorisation(self) -> bool {
        self.0 >= 9
    }

    /// Version 11's clean-up: a redaction keeps all of `m.room.create`, `invite` of power levels, `redacts` in content,
    /// the signed part of a third-party invite; and no longer the top-level `prev_state`, `membership` and `origin`.
    #[must_use]
    pub fn has_updated_redaction_rules(self) -> bool {
        self.0 >= 11
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_versions_and_no_others() {
        for number in 1..=12 {
            assert_eq!(RoomVersion::of(&number.to_string()), Some(RoomVersion(number)));
        }
        assert_eq!(RoomVersion::of("org.matrix.msc3757.10"), RoomVersion::of("10"));
        assert_eq!(RoomVersion::of("org.matrix.hydra.11"), RoomVersion::of("12"));
        for unknown in ["", "0", "13", "01", "+1", " 1", "1 ", "300", "org.matrix.msc4242", "v1"] {
            assert_eq!(RoomVersion::of(unknown), None, "{unknown:?}");
        }
    }

    #[test]
    fn formats_follow_the_version() {
        let format = |id| RoomVersion::of(id).unwrap().format().number();
        assert_eq!(["1", "2", "3", "4", "11", "12"].map(format), [1, 1, 2, 3, 3, 4]);
    }
}
