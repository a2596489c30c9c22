//! What is counted, and under which names.
//!
//! Names that start with `synapse_` are those of Synapse's own sender, so that the dashboards an operator has go on
//! working. No label holds anything that other servers choose (a destination, a room): the number of series is fixed.

use std::{fmt, time::Duration};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::core::id::ServerName;

/// Every metric of the process, made once and shared.
pub struct Metrics {
    registry: Registry,
    /// Transactions that were accepted.
    pub sent_transactions: Counter,
    /// PDUs that had at least one destination.
    pub sent_pdus: Counter,
    /// PDUs times their destinations.
    pub sent_pdu_destinations: Counter,
    /// Events that the event loop has gone through.
    pub events_processed: Counter,
    /// Destinations that are being sent to or have something unsent.
    pub pending_destinations: Gauge,
    /// Unsent PDUs of all destinations.
    pub pending_pdus: Gauge,
    /// Position of the event loop in the events stream.
    pub event_position: Gauge,
    /// When the newest event that the loop went through was received, ms since the epoch.
    pub event_last_ts: Gauge,
    /// How long ago that was when the loop went through it, ms.
    pub event_lag: Gauge,
    /// Sticky events of a backlog that were accepted.
    pub sticky_backlog_sent: Counter,
    /// Sticky events of a backlog that were given up: left out of several answers that were otherwise good.
    pub sticky_backlog_abandoned: Counter,
    /// From when a join became visible to us to the last sticky event of that backlog accepted, seconds.
    pub join_to_last_sticky: Histogram,
    /// Whether the event loop could read from the database when it last tried: 1 or 0.
    pub database_up: Gauge,
    /// Whether the subscription to Redis stands: 1 or 0.
    pub redis_up: Gauge,
    /// Events whose hosts could not be computed in time, so that the joined hosts stood in.
    pub hosts_fallback: Counter,
    /// Errors for single PDUs in answers that were otherwise good.
    pub pdu_errors: Counter,
    destinations: Family<DestinationLabel, Gauge>,
    checkpoint_seconds: Histogram,
    checkpoints: Family<CheckpointLabel, Counter>,
    http_responses: Family<ResponseLabel, Counter>,
}

/// What a destination is at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DestinationState {
    /// It gets events as they come.
    Live,
    /// It is owed events that are no longer in memory.
    Behind,
    /// It failed and is not tried at the moment.
    Backoff,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum CheckpointResult {
    Ok,
    Error,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ResponseClass {
    Informational,
    Success,
    Redirect,
    Refused,
    Failed,
    /// No answer: no connection, or it broke, or time was up.
    Absent,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DestinationLabel {
    state: DestinationState,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CheckpointLabel {
    result: CheckpointResult,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResponseLabel {
    class: ResponseClass,
}

macro_rules! label_values {
    ($type:ident { $($variant:ident => $text:literal),+ $(,)? }) => {
        impl $type {
            const ALL: &[Self] = &[$(Self::$variant),+];
        }

        impl EncodeLabelValue for $type {
            fn encode(&self, encoder: &mut prometheus_client::encoding::LabelValueEncoder<'_>) -> fmt::Result {
                let text = match self {
                    $(Self::$variant => $text),+
                };
                text.encode(encoder)
            }
        }
    };
}

label_values!(DestinationState { Live => "live", Behind => "behind", Backoff => "backoff" });
label_values!(CheckpointResult { Ok => "ok", Error => "error" });
label_values!(ResponseClass {
    Informational => "1xx",
    Success => "2xx",
    Redirect => "3xx",
    Refused => "4xx",
    Failed => "5xx",
    Absent => "none",
});

impl Metrics {
    /// Everything at zero. `server_name` is a label of every series, as it is Synapse's.
    #[must_use]
    pub fn new(server_name: &ServerName) -> Self {
        let label = |name: &'static str, value: &str| std::iter::once((name.into(), value.to_owned().into()));
        let mut registry = Registry::with_labels(label("server_name", server_name.as_str()));
        let mut metrics = Self {
            sent_transactions: Counter::default(),
            sent_pdus: Counter::default(),
            sent_pdu_destinations: Counter::default(),
            events_processed: Counter::default(),
            pending_destinations: Gauge::default(),
            pending_pdus: Gauge::default(),
            event_position: Gauge::default(),
            event_last_ts: Gauge::default(),
            event_lag: Gauge::default(),
            sticky_backlog_sent: Counter::default(),
            sticky_backlog_abandoned: Counter::default(),
            // A local joiner takes well below a second; waiting for one to finish its join takes a minute at most, and
            // one that was away takes hours.
            join_to_last_sticky: Histogram::new([0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0]),
            destinations: Family::default(),
            checkpoint_seconds: Histogram::new([0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0]),
            checkpoints: Family::default(),
            database_up: Gauge::default(),
            redis_up: Gauge::default(),
            hosts_fallback: Counter::default(),
            pdu_errors: Counter::default(),
            http_responses: Family::default(),
            registry: Registry::default(),
        };
        metrics.register_synapses(&mut registry);
        metrics.register_own(&mut registry);
        metrics.registry = registry;
        metrics.create_series();
        metrics
    }

    /// So many destinations are in `state`.
    pub fn set_destinations(&self, state: DestinationState, number: usize) {
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        self.destinations.get_or_create(&DestinationLabel { state }).set(number);
    }

    /// A checkpoint was tried: whether the database took it, and how long that took.
    pub fn checkpoint(&self, written: bool, took: Duration) {
        let result = if written {
            CheckpointResult::Ok
        } else {
            CheckpointResult::Error
        };
        self.checkpoints.get_or_create(&CheckpointLabel { result }).inc();
        self.checkpoint_seconds.observe(took.as_secs_f64());
    }

    /// A request to another server ended, with an HTTP status or without any answer.
    pub fn http_response(&self, status: Option<u16>) {
        let class = match status {
            None => ResponseClass::Absent,
            Some(..200) => ResponseClass::Informational,
            Some(200..300) => ResponseClass::Success,
            Some(300..400) => ResponseClass::Redirect,
            Some(400..500) => ResponseClass::Refused,
            Some(500..) => ResponseClass::Failed,
        };
        self.http_responses.get_or_create(&ResponseLabel { class }).inc();
    }

    /// The Prometheus exposition (`OpenMetrics` text).
    #[must_use]
    pub fn exposition(&self) -> String {
        let mut exposition = String::new();
        // Writing into a `String` does not fail, and no encoder of ours does.
        let _ = text::encode(&mut exposition, &self.registry);
        exposition
    }

    fn register_synapses(&self, registry: &mut Registry) {
        let mut add = |name: &str, help: &str, counter: &Counter| {
            registry.register(format!("synapse_federation_client_{name}"), help, counter.clone());
        };
        add("sent_transactions", "Transactions accepted", &self.sent_transactions);
        add(
            "sent_pdu_destinations_count",
            "PDUs with at least one destination",
            &self.sent_pdus,
        );
        add(
            "sent_pdu_destinations",
            "PDUs times their destinations",
            &self.sent_pdu_destinations,
        );
        add("events_processed", "Events gone through", &self.events_processed);

        let mut add = |name: &str, help: &str, gauge: &Gauge| {
            registry.register(
                format!("synapse_federation_transaction_queue_pending_{name}"),
                help,
                gauge.clone(),
            );
        };
        add(
            "destinations",
            "Destinations with something unsent",
            &self.pending_destinations,
        );
        add("pdus", "PDUs unsent, over all destinations", &self.pending_pdus);

        let registry = registry.sub_registry_with_label(("name".into(), "federation_sender".into()));
        let mut add = |name: &str, help: &str, gauge: &Gauge| {
            registry.register(format!("synapse_event_processing_{name}"), help, gauge.clone());
        };
        add("positions", "Position in the events stream", &self.event_position);
        add(
            "last_ts",
            "When the newest event gone through was received, ms since the epoch",
            &self.event_last_ts,
        );
        add(
            "lag",
            "How old that event was when it was gone through, ms",
            &self.event_lag,
        );
    }

    fn register_own(&self, registry: &mut Registry) {
        let mut add = |name: &str, help: &str, counter: &Counter| {
            registry.register(format!("burdock_{name}"), help, counter.clone());
        };
        add(
            "sticky_backlog_sent",
            "Sticky events of a backlog accepted",
            &self.sticky_backlog_sent,
        );
        add(
            "sticky_backlog_abandoned",
            "Sticky events of a backlog given up",
            &self.sticky_backlog_abandoned,
        );
        add(
            "hosts_fallback",
            "Events sent to the joined hosts, the exact ones being unknown",
            &self.hosts_fallback,
        );
        add("pdu_errors", "Errors for single PDUs in good answers", &self.pdu_errors);

        let mut add = |name: &str, help: &str, histogram: &Histogram| {
            registry.register(format!("burdock_{name}"), help, histogram.clone());
        };
        add(
            "join_to_last_sticky_seconds",
            "From a join becoming visible to its last sticky event accepted",
            &self.join_to_last_sticky,
        );
        add(
            "checkpoint_seconds",
            "How long a checkpoint took",
            &self.checkpoint_seconds,
        );

        registry.register(
            "burdock_destinations",
            "Destinations met since the start: live (get events as they come), behind (are caught up), backoff (failed, wait)",
            self.destinations.clone(),
        );
        registry.register(
            "burdock_database_up",
            "Whether events could be read when last tried",
            self.database_up.clone(),
        );
        registry.register(
            "burdock_redis_up",
            "Whether the subscription to Redis stands",
            self.redis_up.clone(),
        );
        registry.register("burdock_checkpoints", "Checkpoints by result", self.checkpoints.clone());
        registry.register(
            "burdock_http_responses",
            "Answers of other servers by class",
            self.http_responses.clone(),
        );
    }

    /// A series that appears only with its first increment hides that increment from `rate()`.
    fn create_series(&self) {
        for &state in DestinationState::ALL {
            drop(self.destinations.get_or_create(&DestinationLabel { state }));
        }
        for &result in CheckpointResult::ALL {
            drop(self.checkpoints.get_or_create(&CheckpointLabel { result }));
        }
        for &class in ResponseClass::ALL {
            drop(self.http_responses.get_or_create(&ResponseLabel { class }));
        }
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exposition() {
        let metrics = Metrics::new(&"hs1.test".into());
        metrics.sent_transactions.inc();
        metrics.event_position.set(42);
        metrics.join_to_last_sticky.observe(0.3);
        metrics.set_destinations(DestinationState::Backoff, 7);
        metrics.checkpoint(true, Duration::from_millis(3));
        metrics.http_response(Some(429));
        metrics.http_response(None);
        let mut lines: Vec<String> = metrics.exposition().lines().map(str::to_owned).collect();
        lines.sort(); // a family's series come in the order of a hash map
        insta::assert_snapshot!(lines.join("\n"));
    }
}
