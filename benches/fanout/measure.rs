//! What is measured of one sender.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::{sink::Sink, usage};
use crate::rig::{
    Rig,
    sender::{Kind, Sender},
};

/// How often the time of a single event is taken.
const ROUNDS: usize = 10;

/// Events of the burst.
const BURST: usize = 20;

/// Longest wait for what must arrive.
const PATIENCE: Duration = Duration::from_mins(10);

/// How long a sender may tidy up after the last receipt, and the client after its last request.
const SETTLE: Duration = Duration::from_secs(2);

/// Many events to many servers.
#[derive(Debug)]
pub struct Throughput {
    /// What is taken for the start, to the last receipt.
    pub time: Duration,
    pub transactions: u32,
    pub pdus: u32,
    /// The sender's CPU time.
    pub cpu: Duration,
}

/// One sender's figures.
#[derive(Debug)]
pub struct Figures {
    /// One event while there are no connections, from the answer to the client to the last receipt.
    pub cold: Duration,
    /// The same when there are, ascending.
    pub warm: Vec<Duration>,
    /// Events as fast as the client can send them, from its first request.
    pub burst: Throughput,
    /// When its last request was answered.
    pub burst_client: Duration,
    /// Events that are all there already, from when the sender goes on.
    pub piled_up: Throughput,
    /// Resident memory in the end, kB.
    pub memory: u32,
}

/// A sender at work on a room that all of the sink's servers are in.
struct Measurement<'a> {
    rig: &'a Rig,
    sink: &'a Sink,
    room: &'a str,
    sender: Sender,
}

/// Starts a sender, measures it, and stops it.
pub async fn measure(rig: &Rig, sink: &Sink, room: &str, kind: Kind, piled_up: usize) -> Result<Figures> {
    let sender = rig.sender(kind, "fed1", &["fed1"]).await?;
    let measurement = Measurement {
        rig,
        sink,
        room,
        sender,
    };
    tokio::time::sleep(SETTLE).await;
    let cold = measurement.one_event().await?;
    let mut warm = vec![];
    for _ in 0..ROUNDS {
        warm.push(measurement.one_event().await?);
    }
    warm.sort();
    let (burst, burst_client) = measurement.burst().await?;
    let piled_up = measurement.piled_up(piled_up).await?;
    let memory = usage::memory(measurement.sender.process.id())?;
    measurement.sender.stop().await?;
    Ok(Figures {
        cold,
        warm,
        burst,
        burst_client,
        piled_up,
        memory,
    })
}

impl Measurement<'_> {
    async fn one_event(&self) -> Result<Duration> {
        tokio::time::sleep(Duration::from_millis(500)).await;
        self.sink.reset();
        let event = self.rig.alice.send(self.room, "hello").await?;
        let answered = Instant::now();
        let (_, last) = self.sink.wait_for(&[event], PATIENCE).await?;
        Ok(last.saturating_duration_since(answered))
    }

    async fn burst(&self) -> Result<(Throughput, Duration)> {
        tokio::time::sleep(SETTLE).await;
        let cpu = self.cpu()?;
        self.sink.reset();
        let start = Instant::now();
        let events = self.rig.alice.send_many(self.room, BURST, "burst").await?;
        let client = start.elapsed();
        Ok((self.arrive(&events, start, cpu).await?, client))
    }

    /// The sender is halted while the events are made, so that it alone sets the pace. (Stopping it would not do:
    /// Synapse's, when it starts, sends only the newest of what it finds.)
    async fn piled_up(&self, count: usize) -> Result<Throughput> {
        tokio::time::sleep(SETTLE).await;
        let cpu = self.cpu()?;
        self.sink.reset();
        self.sender.process.signal("STOP");
        let events = self.rig.alice.send_many(self.room, count, "piled up").await?;
        tokio::time::sleep(SETTLE).await;
        let start = Instant::now();
        self.sender.process.signal("CONT");
        self.arrive(&events, start, cpu).await
    }

    async fn arrive(&self, events: &[String], start: Instant, cpu: Duration) -> Result<Throughput> {
        let (received, last) = self.sink.wait_for(events, PATIENCE).await?;
        tokio::time::sleep(SETTLE).await;
        Ok(Throughput {
            time: last - start,
            transactions: received.transactions,
            pdus: received.pdus,
            cpu: self.cpu()?.saturating_sub(cpu),
        })
    }

    fn cpu(&self) -> Result<Duration> {
        usage::cpu(self.sender.process.id())
    }
}
