use std::time::Duration;

use super::*;
use crate::core::{clock::Millis, event::Pdu};

const LIMITS: Limits = Limits {
    pending: 1_000,
    age: Duration::from_secs(10),
    bytes: 1_000,
    window: 1_000,
};

/// The event `$2` is owed to the destination.
fn enter_2(ledger: &mut Ledger, name: &ServerName, now: Now) {
    let pdu = OwedPdu {
        ordering: StreamOrdering(2),
        pdu: Pdu {
            event_id: "$2".into(),
            room_id: "!a".into(),
            origin_server_ts: 0,
            bytes: vec![b'x'].into(),
        },
        since: now.at,
    };
    let entry = Entry {
        pdu: Arc::new(pdu),
        destinations: vec![name.clone()],
    };
    ledger.enter(&[entry], [], StreamOrdering(2), now);
}

/// A destination that catches up and has `$2` in memory, above what is rows; everything is written.
fn catching_up(name: &ServerName, now: Now) -> Ledger {
    let cursor = EventCursor {
        position: StreamOrdering(1),
        ours: true,
        deltas: None,
    };
    let record = DestinationRecord {
        last_successful: Some(StreamOrdering(0)),
        owed_from: Some(StreamOrdering(1)),
        owed_up_to: Some(StreamOrdering(1)),
        ..DestinationRecord::default()
    };
    let mut ledger = Ledger::new(cursor, LIMITS);
    ledger.introduce(name.clone(), &record, now);
    assert!(matches!(ledger.next(name, now), Step::CatchUp { .. }));
    ledger.caught_up_to(name, StreamOrdering(1), now);
    enter_2(&mut ledger, name, now);
    assert_eq!(ledger.cursor(), StreamOrdering(1));
    // One that other destinations gave reason for.
    ledger.wrote(&Checkpoint {
        cursor: StreamOrdering(1),
        ..Checkpoint::default()
    });
    ledger
}

fn start() -> Now {
    Now {
        wall: Millis(1_000_000),
        at: Instant::now(),
    }
}

fn assert_owed(ledger: &Ledger, name: &ServerName) {
    let checkpoint = ledger.checkpoint().unwrap();
    assert_eq!(checkpoint.cursor, StreamOrdering(2));
    assert_eq!(
        checkpoint.owed,
        [(name.clone(), RoomId::from("!a"), StreamOrdering(2))],
        "the cursor passed it, so it must be a row"
    );
}

#[test]
fn a_back_off_that_another_process_set_makes_rows_of_what_came_during_catch_up() {
    let (name, now) = (ServerName::from("s"), start());
    let mut ledger = catching_up(&name, now);
    let retry = RetryTimings {
        last_tried: now.wall,
        interval: 60_000,
        failing_since: Some(now.wall),
    };
    ledger.set_retry(&name, retry);
    assert!(matches!(ledger.next(&name, now), Step::BackOff(_)));
    assert_owed(&ledger, &name);
}

#[test]
fn a_catch_up_that_takes_too_long_makes_rows_of_what_came_during_it() {
    let (name, mut now) = (ServerName::from("s"), start());
    let mut ledger = catching_up(&name, now);
    now.at += Duration::from_secs(61);
    let _ = ledger.enforce_age(now);
    assert_owed(&ledger, &name);
}

#[test]
fn a_back_off_that_was_read_before_our_own_attempt_ended_is_not_believed() {
    let (name, now) = (ServerName::from("s"), start());
    let mut ledger = catching_up(&name, now);
    let backing_off = RetryTimings {
        last_tried: now.wall,
        interval: 604_800_000,
        failing_since: Some(now.wall),
    };
    ledger.set_retry(&name, backing_off);
    let before = ledger.retry(&name);
    ledger.set_retry(&name, RetryTimings::default()); // it answered us
    ledger.read_retry(&name, before, backing_off);
    assert_eq!(ledger.retry(&name), RetryTimings::default());
    ledger.read_retry(&name, RetryTimings::default(), backing_off);
    assert_eq!(ledger.retry(&name), backing_off);
}

#[test]
fn what_became_a_row_while_none_was_found_keeps_it_behind() {
    let (name, mut now) = (ServerName::from("s"), start());
    let cursor = EventCursor {
        position: StreamOrdering(1),
        ours: true,
        deltas: None,
    };
    let record = DestinationRecord {
        last_successful: Some(StreamOrdering(1)),
        retry: RetryTimings {
            last_tried: now.wall,
            interval: 1_000,
            failing_since: Some(now.wall),
        },
        ..DestinationRecord::default()
    };
    let mut ledger = Ledger::new(cursor, LIMITS);
    ledger.introduce(name.clone(), &record, now);
    now.wall = now.wall.plus(1_000);
    let Step::CatchUp { up_to, .. } = ledger.next(&name, now) else {
        panic!()
    };
    // While the database looks for rows up to there, and finds none:
    enter_2(&mut ledger, &name, now);
    let checkpoint = ledger.checkpoint().unwrap();
    assert_eq!(checkpoint.owed.len(), 1);
    ledger.wrote(&checkpoint);
    assert!(!ledger.caught_up(&name, up_to));
    assert!(matches!(ledger.next(&name, now), Step::CatchUp { up_to, .. } if up_to == StreamOrdering(2)));
}

#[test]
fn its_rows_say_how_each_destination_stands() {
    let (name, now) = (ServerName::from("s"), start());
    let mut ledger = catching_up(&name, now);
    ledger.backlog(&name, |backlog| backlog.recorded(&"!b".into(), now.at));
    let row = DestinationRow {
        destination: name.clone(),
        state: DestinationState::Behind,
        last_successful: Some(StreamOrdering(1)),
        retry: RetryTimings::default(),
        queued: 1,
    };
    let backlog = BacklogRow {
        destination: name,
        room: "!b".into(),
        position: None,
    };
    assert_eq!(ledger.rows(now), (vec![row], vec![backlog]));
}
