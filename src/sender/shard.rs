//! Which sender instance a destination belongs to.

use sha2::{Digest, Sha256};

use crate::core::id::{InstanceName, ServerName};

/// Our share of all destinations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    index: u64,
    count: u64,
}

impl Shard {
    /// The share of `me` among `instances` in configured order; `None` if it is not listed.
    ///
    /// All senders of a homeserver must hold the same list in the same order.
    #[must_use]
    pub fn of(me: &InstanceName, instances: &[InstanceName]) -> Option<Self> {
        let index = instances.iter().position(|instance| instance == me)?;
        Some(Self {
            index: index as u64,
            count: instances.len() as u64,
        })
    }

    /// Whether `destination` is ours to send to.
    ///
    /// Synapse takes the SHA-256 of the name as a little-endian number modulo the number of instances.
    #[must_use]
    pub fn owns(self, destination: &ServerName) -> bool {
        if self.count == 1 {
            return true;
        }
        let digest = Sha256::digest(destination.as_str().as_bytes());
        let owner = digest
            .iter()
            .rev()
            .fold(0, |rest, byte| (rest * 256 + u64::from(*byte)) % self.count);
        owner == self.index
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn the_owner_is_the_one_that_synapse_computes() {
        let vectors: Value =
            serde_json::from_str(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors.json"))).unwrap();
        let cases = vectors["sharding"].as_array().unwrap();
        assert!(!cases.is_empty());
        for case in cases {
            let instances: Vec<InstanceName> = case["instances"]
                .as_array()
                .unwrap()
                .iter()
                .map(|name| name.as_str().unwrap().into())
                .collect();
            let destination = ServerName::from(case["destination"].as_str().unwrap());
            for me in &instances {
                let owns = Shard::of(me, &instances).unwrap().owns(&destination);
                assert_eq!(owns, me.as_str() == case["instance"].as_str().unwrap(), "{case}");
            }
        }
    }

    #[test]
    fn an_instance_that_is_not_listed_has_no_share() {
        assert_eq!(Shard::of(&"fs3".into(), &["fs1".into(), "fs2".into()]), None);
    }
}
