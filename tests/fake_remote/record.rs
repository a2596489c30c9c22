//! What a server was sent, and whether it was sent rightly.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use bytes::Bytes;
use hyper::{Request, header::AUTHORIZATION};
use parking_lot::Mutex;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::event::{Keys, canonical, check_authorization, event_id, verify};

/// The path of a transaction, up to its id.
pub const SEND: &str = "/_matrix/federation/v1/send/";

/// One transaction, as it came in.
#[derive(Debug, Clone)]
pub struct Transaction {
    /// Who sent it.
    pub origin: String,
    /// Its id.
    pub id: String,
    /// When it was read.
    pub received: Instant,
    /// When it was answered with 2xx; absent while it is not, and if it was refused.
    pub accepted: Option<Instant>,
    /// What was in it, in order.
    pub pdus: Vec<Pdu>,
    /// The number of EDUs in it.
    pub edus: usize,
}

/// An event in a transaction.
#[derive(Debug, Clone)]
pub struct Pdu {
    pub event_id: String,
    pub room_id: String,
    /// It was listed in a 2xx answer.
    pub accepted: bool,
}

/// All that one server was sent.
pub struct Record {
    name: String,
    keys: Arc<Keys>,
    log: Mutex<Log>,
}

#[derive(Default)]
struct Log {
    transactions: Vec<Transaction>,
    bodies: HashMap<(String, String), [u8; 32]>,
    versions: HashMap<String, u32>,
    violations: Vec<String>,
    open: HashMap<String, usize>,
    overlaps: usize,
}

/// A transaction that is being answered.
pub struct Open<'a> {
    record: &'a Record,
    index: usize,
    origin: String,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if let Some(open) = self.record.log.lock().open.get_mut(&self.origin) {
            *open -= 1;
        }
    }
}

impl Open<'_> {
    /// The ids of the events in it, with their rooms.
    pub fn pdus(&self) -> Vec<Pdu> {
        self.record.log.lock().transactions[self.index].pdus.clone()
    }

    /// The transaction was answered with 2xx, listing these events.
    pub fn accepted(self, listed: &HashSet<String>) {
        let mut log = self.record.log.lock();
        let transaction = &mut log.transactions[self.index];
        transaction.accepted = Some(Instant::now());
        for pdu in &mut transaction.pdus {
            pdu.accepted = listed.contains(&pdu.event_id);
        }
    }
}

impl Record {
    /// An empty record of what the server `name` is sent by servers with these keys.
    pub fn new(name: &str, keys: Arc<Keys>) -> Self {
        Self {
            name: name.to_owned(),
            keys,
            log: Mutex::default(),
        }
    }

    /// Rooms are taken for version 11 unless it is said here that they are not.
    pub fn set_room_version(&self, room_id: &str, version: u32) {
        self.log.lock().versions.insert(room_id.to_owned(), version);
    }

    /// Writes down a transaction, and what is wrong with it. The error is what a real server would refuse it for.
    pub fn begin(&self, request: &Request<Bytes>) -> Result<Open<'_>, String> {
        let outcome = self.read(request);
        if let Err(problem) = &outcome {
            self.violation(problem.clone());
        }
        outcome
    }

    fn violation(&self, problem: String) {
        self.log.lock().violations.push(problem);
    }

    fn read(&self, request: &Request<Bytes>) -> Result<Open<'_>, String> {
        let path = request.uri().path();
        let id = path.strip_prefix(SEND).ok_or("not a transaction")?.to_owned();
        let header = request
            .headers()
            .get(AUTHORIZATION)
            .and_then(|header| header.to_str().ok());
        let body: Value = serde_json::from_slice(request.body()).map_err(|error| error.to_string())?;
        if canonical(&body) != request.body().as_ref() {
            self.violation(format!("the body of transaction {id} is not canonical JSON"));
        }
        let origin = check_authorization(
            header.unwrap_or_default(),
            request.method().as_str(),
            path,
            &self.name,
            Some(&body),
            &self.keys,
        )?;
        let pdus = body["pdus"].as_array().ok_or("a transaction without `pdus`")?;
        let edus = body["edus"].as_array().map_or(0, Vec::len);
        let mut log = self.log.lock();
        if body["origin"] != origin.as_str() {
            log.violations
                .push(format!("transaction {id} of {origin} says it is {}'s", body["origin"]));
        }
        if pdus.len() > 50 || edus > 100 {
            log.violations
                .push(format!("transaction {id} holds {} PDUs and {edus} EDUs", pdus.len()));
        }
        let pdus = pdus.iter().map(|pdu| {
            let room_id = pdu["room_id"].as_str().unwrap_or_default().to_owned();
            let version = log.versions.get(&room_id).copied().unwrap_or(11);
            let event_id = event_id(pdu, version);
            if let Err(problem) = verify(pdu, version, &self.keys) {
                log.violations
                    .push(format!("event {event_id} in transaction {id}: {problem}"));
            }
            Pdu {
                event_id,
                room_id,
                accepted: false,
            }
        });
        let pdus = pdus.collect();
        let digest = Sha256::digest(request.body()).into();
        if *log.bodies.entry((origin.clone(), id.clone())).or_insert(digest) != digest {
            log.violations
                .push(format!("transaction id {id} of {origin} stands for two bodies"));
        }
        let open = log.open.entry(origin.clone()).or_default();
        *open += 1;
        if *open > 1 {
            log.overlaps += 1;
        }
        let index = log.transactions.len();
        log.transactions.push(Transaction {
            origin: origin.clone(),
            id,
            received: Instant::now(),
            accepted: None,
            pdus,
            edus,
        });
        Ok(Open {
            record: self,
            index,
            origin,
        })
    }

    /// All transactions so far, in the order in which they came.
    pub fn transactions(&self) -> Vec<Transaction> {
        self.log.lock().transactions.clone()
    }

    /// The transactions so far that hold an event of this room.
    pub fn transactions_of(&self, room_id: &str) -> Vec<Transaction> {
        let mut transactions = self.transactions();
        transactions.retain(|transaction| transaction.pdus.iter().any(|pdu| pdu.room_id == room_id));
        transactions
    }

    /// The ids of this room's events that were accepted, in order, with repeats.
    pub fn accepted(&self, room_id: &str) -> Vec<String> {
        let log = self.log.lock();
        let pdus = log.transactions.iter().flat_map(|transaction| &transaction.pdus);
        pdus.filter(|pdu| pdu.accepted && pdu.room_id == room_id)
            .map(|pdu| pdu.event_id.clone())
            .collect()
    }

    /// How many of this room's events were accepted more than once.
    pub fn repeats(&self, room_id: &str) -> usize {
        let accepted = self.accepted(room_id);
        accepted.len() - accepted.iter().collect::<HashSet<_>>().len()
    }

    /// Whether this event was ever sent, accepted or not.
    pub fn was_sent(&self, event_id: &str) -> bool {
        let log = self.log.lock();
        log.transactions
            .iter()
            .flat_map(|transaction| &transaction.pdus)
            .any(|pdu| pdu.event_id == event_id)
    }

    /// When the last of these events was first accepted; `None` if one was not yet.
    pub fn all_accepted_at(&self, event_ids: &[String]) -> Option<Instant> {
        let log = self.log.lock();
        let mut first: HashMap<&str, Instant> = HashMap::new();
        for transaction in &log.transactions {
            let Some(at) = transaction.accepted else { continue };
            for pdu in transaction.pdus.iter().filter(|pdu| pdu.accepted) {
                let entry = first.entry(&pdu.event_id).or_insert(at);
                *entry = at.min(*entry);
            }
        }
        event_ids
            .iter()
            .map(|id| first.get(id.as_str()).copied())
            .collect::<Option<Vec<_>>>()?
            .into_iter()
            .max()
    }

    /// Waits until all of these events were accepted.
    pub async fn wait_for(&self, event_ids: &[String], within: Duration) -> Result<()> {
        ensure!(!event_ids.is_empty(), "nothing to wait for");
        let deadline = Instant::now() + within;
        while self.all_accepted_at(event_ids).is_none() {
            if Instant::now() > deadline {
                let missing: Vec<_> = event_ids
                    .iter()
                    .filter(|id| self.all_accepted_at(&[(*id).clone()]).is_none())
                    .collect();
                bail!(
                    "{} still lacks {} of {} events after {within:?}, the first is {}",
                    self.name,
                    missing.len(),
                    event_ids.len(),
                    missing[0],
                );
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// An error if anything that came was wrong: signatures, hashes, limits, or an id used for two bodies.
    pub fn check(&self) -> Result<()> {
        let log = self.log.lock();
        ensure!(
            log.violations.is_empty(),
            "{} things are wrong with what {} was sent, the first: {}",
            log.violations.len(),
            self.name,
            log.violations[0],
        );
        Ok(())
    }

    /// Forgets what was wrong so far.
    pub fn forgive(&self) {
        self.log.lock().violations.clear();
    }

    /// How often a transaction came in while another of the same origin was not answered.
    pub fn overlaps(&self) -> usize {
        self.log.lock().overlaps
    }
}
