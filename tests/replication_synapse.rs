//! What we write on the channel, as Synapse's own parser reads it.
//!
//! `BURDOCK_TEST_SYNAPSE`: a Python that has Synapse.

use std::{
    io::Write as _,
    process::{Command as Process, Stdio},
};

use burdock::core::{
    clock::Millis,
    id::{StickyPosition, StreamOrdering, Token},
    replication::{
        bus::{Bus, BusEvent},
        command::{Device, InstanceId},
        gap::{CacheInvalidation, FetchError, GapSource, Group},
        local_bus::LocalBus,
        master::{self, MasterStart},
        positions::Positions,
        rows::{self, EventRow, PresenceRow},
        sync_reports::{Presence, SyncReports},
    },
    store::CacheRow,
};
use rand::{SeedableRng, rngs::StdRng};
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Prints what each line of the input means to Synapse, one line each.
const READER: &str = r#"
import sys
from synapse.replication.tcp.commands import parse_command_from_line
from synapse.replication.tcp.streams import STREAMS_MAP
for line in sys.stdin:
    command = parse_command_from_line(line.rstrip("\n"))
    words = [command.NAME]
    if command.NAME == "RDATA":
        row = STREAMS_MAP[command.stream_name].parse_row(command.row)
        words += [command.stream_name, command.instance_name, command.token, row]
    elif command.NAME == "POSITION":
        assert command.stream_name in STREAMS_MAP
        words += [command.stream_name, command.instance_name, command.prev_token, command.new_token]
    elif command.NAME == "USER_SYNC":
        words += [command.user_id, command.device_id, command.is_syncing, command.last_sync_ms]
    print(*words)
"#;

struct NoRows;

impl GapSource for NoRows {
    async fn cache_rows(
        &self,
        _: &burdock::core::id::InstanceName,
        _: Token,
        _: Token,
        _: usize,
    ) -> Result<Vec<CacheInvalidation>, FetchError> {
        Ok(Vec::new())
    }
}

/// All that a master says on the channel until `REMOTE_SERVER_UP end`.
async fn lines_of_a_master() -> Vec<String> {
    let (shutdown, tracker) = (CancellationToken::new(), TaskTracker::new());
    let bus = LocalBus::default();
    let (sender, mut events) = mpsc::channel(1_024);
    tracker.spawn(shutdown.clone().run_until_cancelled_owned(bus.clone().listen(sender)));
    assert!(matches!(events.recv().await, Some(BusEvent::Subscribed)));
    let start = MasterStart {
        events: Positions::at_start(&["master".into()], &[], [StreamOrdering(10)]),
        sticky_events: Positions::at_start(&["master".into()], &[], [StickyPosition(3)]),
        caches: Token(20),
        presence: Token(1_753_000_000_000),
    };
    let master = master::start(bus, "master".into(), start, NoRows, &shutdown, &tracker);
    // Rows before the connection stands would be a position.
    let mut lines = Vec::new();
    let mut next = async || match events.recv().await {
        Some(BusEvent::Line(line)) => line,
        other => panic!("{other:?}"),
    };
    while lines
        .iter()
        .filter(|line: &&String| line.starts_with("POSITION typing"))
        .count()
        < 3
    {
        lines.push(next().await);
    }
    let streams = &master.streams;

    let drawn =
        |ids: Vec<i64>| async { Ok::<_, std::convert::Infallible>(ids.into_iter().map(StreamOrdering).collect()) };
    let write = streams.events.draw(drawn(vec![11, 12])).await.unwrap();
    let event = |event_id: &str, state_key: Option<&str>| EventRow {
        event_id: event_id.into(),
        room_id: "!r:example.com".into(),
        kind: "m.room.member".to_owned(),
        state_key: state_key.map(str::to_owned),
        redacts: Some("$redacted".into()),
        relates_to: None,
        membership: Some("join".to_owned()),
        rejected: false,
        outlier: true,
    };
    write.finish(vec![Group {
        token: Token(12),
        rows: vec![
            rows::event(&event("$one", Some("@ännchen:example.com"))),
            rows::event(&event("$two", None)),
        ],
    }]);
    let mut sticky = streams.sticky_events.begin();
    sticky.drawn(vec![StickyPosition(4)]).unwrap();
    sticky.finish(vec![Group {
        token: Token(4),
        rows: vec![rows::sticky_event(&"!r:example.com".into(), &"$one".into())],
    }]);
    streams.typing(&"!r:example.com".into(), &["@ann:example.com".to_owned()]);
    streams.presence(&PresenceRow {
        user_id: "@ann:example.com".to_owned(),
        state: "online".to_owned(),
        last_active: Millis(1),
        last_federation_update: Millis(2),
        last_user_sync: Millis(3),
        status_msg: None,
        currently_active: true,
    });
    master.subscription.publisher.cache_row(&CacheRow {
        token: Token(21),
        destination: "remote.example".into(),
        at: Millis(5),
        writer: "master".into(),
    });
    let me = InstanceId::draw(&mut StdRng::seed_from_u64(1));
    let mut reports = SyncReports::new(me, Presence::Elsewhere);
    let device = |device_id: Option<&str>| Device {
        user_id: "@ann:example.com".to_owned(),
        device_id: device_id.map(str::to_owned),
    };
    for command in [
        reports.started(device(Some("PHONE")), Millis(7)),
        reports.started(device(None), Millis(8)),
        reports.ended(device(None), Millis(9)),
        reports.stopping(),
    ] {
        streams.user_sync(&command.unwrap());
    }
    master.subscription.publisher.remote_server_up(&"end".into());
    while lines.last().is_none_or(|line| line != "REMOTE_SERVER_UP end") {
        lines.push(next().await);
    }
    shutdown.cancel();
    lines
}

#[tokio::test]
async fn synapse_understands_what_a_master_says() {
    let Ok(python) = std::env::var("BURDOCK_TEST_SYNAPSE") else {
        eprintln!("skipped: BURDOCK_TEST_SYNAPSE is not set");
        return;
    };
    let lines = lines_of_a_master().await;
    let mut reader = Process::new(python)
        .args(["-c", READER])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .env("PYTHONIOENCODING", "utf-8")
        .spawn()
        .unwrap();
    let input = lines.join("\n") + "\n";
    reader.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = reader.wait_with_output().unwrap();
    assert!(output.status.success(), "Synapse rejects a line of:\n{input}");
    let read = String::from_utf8(output.stdout).unwrap();
    insta::assert_snapshot!(read);
}
