//! The body of a transaction, built once for all destinations that get the same PDUs.

use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;

use super::transaction::OwedPdu;
use crate::{
    core::{
        clock::Millis,
        id::{ServerName, StreamOrdering},
    },
    federation::transaction::Body,
};

/// Bodies that are remembered. Destinations that keep pace ask for the same few; more would only pin memory.
const REMEMBERED: usize = 32;

/// Bodies of late, by the PDUs in them.
#[derive(Debug, Default)]
pub struct Bodies {
    recent: Mutex<Recent>,
}

#[derive(Debug, Default)]
struct Recent {
    bodies: HashMap<Vec<StreamOrdering>, Body>,
    oldest_first: VecDeque<Vec<StreamOrdering>>,
}

impl Bodies {
    /// The body that holds `pdus`. Its time is that of its first building.
    pub fn of(&self, origin: &ServerName, pdus: &[impl AsRef<OwedPdu>], now: Millis) -> Body {
        let key: Vec<StreamOrdering> = pdus.iter().map(|pdu| pdu.as_ref().ordering).collect();
        if let Some(body) = self.recent.lock().bodies.get(&key) {
            return body.clone();
        }
        let bytes: Vec<_> = pdus.iter().map(|pdu| pdu.as_ref().pdu.bytes.clone()).collect();
        let body = Body::build(origin, now, &bytes);
        let mut recent = self.recent.lock();
        if recent.bodies.insert(key.clone(), body.clone()).is_none() {
            recent.oldest_first.push_back(key);
        }
        if recent.oldest_first.len() > REMEMBERED
            && let Some(oldest) = recent.oldest_first.pop_front()
        {
            recent.bodies.remove(&oldest);
        }
        body
    }
}
