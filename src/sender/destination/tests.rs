use super::*;
use crate::{
    core::{clock::Millis, event::Pdu, id::StickyPosition, store::BacklogRow},
    sender::{pace::Seen, transaction::HOLD_PATIENCE},
};

const LIMITS: Limits = Limits {
    pending: 1_000,
    age: Duration::from_secs(10),
    bytes: 1_000,
    window: 1_000,
};

struct Scene {
    destination: Destination,
    outstanding: Outstanding,
    now: Now,
    head: StreamOrdering,
}

impl Scene {
    fn new(record: &DestinationRecord) -> Self {
        let now = Now {
            wall: Millis(1_000_000),
            at: Instant::now(),
        };
        Self {
            destination: Destination::new(record, LIMITS, now),
            outstanding: Outstanding::default(),
            now,
            head: StreamOrdering(0),
        }
    }

    fn live() -> Self {
        Self::new(&DestinationRecord {
            last_successful: Some(StreamOrdering(0)),
            ..DestinationRecord::default()
        })
    }

    fn event(&mut self, ordering: i64, room: &str, bytes: usize) {
        let ordering = StreamOrdering(ordering);
        let pdu = Pdu {
            event_id: format!("${ordering}").into(),
            room_id: room.into(),
            origin_server_ts: 0,
            bytes: vec![b'x'; bytes].into(),
        };
        let since = self.now.at;
        let pdu = Arc::new(OwedPdu { ordering, pdu, since });
        self.destination
            .append(&pdu, LIMITS, None, self.now, &mut self.outstanding);
        self.head = self.head.max(ordering);
    }

    fn pass(&mut self, ms: u64) {
        self.now.at += Duration::from_millis(ms);
        self.now.wall = self.now.wall.plus(i64::try_from(ms).unwrap());
    }

    fn next(&mut self) -> Step {
        self.destination
            .next(LIMITS, self.head, None, self.now, &mut self.outstanding)
    }

    /// The orderings that are sent next.
    fn sent(&mut self) -> Vec<i64> {
        match self.next() {
            Step::Send(pdus) => pdus.iter().map(|pdu| pdu.ordering.0).collect(),
            step => panic!("{step:?}"),
        }
    }

    fn accept(&mut self) {
        self.destination
            .accepted(|_| true, None, self.now, &mut self.outstanding);
    }

    fn last_successful(&self) -> i64 {
        self.destination.last_successful().unwrap().0
    }
}

#[test]
fn a_transaction_holds_fifty_pdus() {
    let mut scene = Scene::live();
    for ordering in 1..=120 {
        scene.event(ordering, "!a", 1);
    }
    assert_eq!(scene.sent(), (1..=50).collect::<Vec<_>>());
    scene.accept();
    assert_eq!(scene.last_successful(), 50);
    assert_eq!(scene.sent(), (51..=100).collect::<Vec<_>>());
    scene.accept();
    assert_eq!(scene.sent(), (101..=120).collect::<Vec<_>>());
    assert_eq!(scene.outstanding.lowest(), Some(StreamOrdering(101)));
    scene.accept();
    assert!(matches!(scene.next(), Step::Idle));
    assert_eq!(scene.last_successful(), 120);
    assert!(scene.outstanding.is_empty());
}

#[test]
fn a_transaction_is_bounded_in_bytes_and_a_larger_pdu_goes_alone() {
    let mut scene = Scene::live();
    for (ordering, bytes) in [(1, 400), (2, 500), (3, 400), (4, 5_000), (5, 10)] {
        scene.event(ordering, "!a", bytes);
    }
    for expected in [vec![1, 2], vec![3], vec![4], vec![5]] {
        assert_eq!(scene.sent(), expected);
        scene.accept();
    }
}

#[test]
fn live_pdus_of_a_room_wait_for_its_backlog_but_others_do_not() {
    let mut scene = Scene::live();
    scene.destination.backlog().recorded(&"!a".into(), scene.now.at);
    scene.event(1, "!a", 1);
    scene.event(2, "!b", 1);
    assert!(matches!(scene.next(), Step::Backlog(BacklogStep::Load)));
    let row = BacklogRow {
        room_id: "!a".into(),
        position: StickyPosition(7),
        recent_join: None,
    };
    scene.destination.backlog().loaded(vec![row], scene.now.at);
    assert!(matches!(scene.next(), Step::Backlog(BacklogStep::Push { .. })));
    assert_eq!(scene.sent(), [2]);
    scene.accept();
    assert_eq!(scene.last_successful(), 0, "1 was not accepted");
    scene.destination.backlog().finished(&"!a".into());
    assert_eq!(scene.sent(), [1]);
    scene.accept();
    assert_eq!(scene.last_successful(), 2);
}

/// How long a live PDU waits for a room's backlog, whose joiner says that it is still joining, or says nothing.
fn wait_of_a_live_pdu(answers: bool) -> Duration {
    let mut scene = Scene::live();
    scene.destination.backlog().loaded(
        vec![BacklogRow {
            room_id: "!a".into(),
            position: StickyPosition(7),
            recent_join: answers.then(|| "$join".into()),
        }],
        scene.now.at,
    );
    scene.event(1, "!a", 1);
    let began = scene.now.at;
    loop {
        match scene.next() {
            Step::Backlog(BacklogStep::Probe { room, .. }) => {
                scene.destination.backlog().probed(&room, false, scene.now.at);
            }
            Step::Backlog(BacklogStep::Push {
                room,
                position,
                unlisted,
                ..
            }) => {
                let times = unlisted + 1;
                scene
                    .destination
                    .backlog()
                    .left_out(&room, position, times, scene.now.at);
            }
            Step::Wait(until) => {
                scene.now.at = until;
                scene.destination.enforce_age(LIMITS, scene.now, &mut scene.outstanding);
            }
            Step::Send(_) => break,
            step => panic!("{step:?}"),
        }
    }
    assert!(scene.destination.is_live());
    scene.now.at - began
}

#[test]
fn live_pdus_do_not_wait_for_ever() {
    assert_eq!(wait_of_a_live_pdu(false), HOLD_PATIENCE);
    assert_eq!(wait_of_a_live_pdu(true), HOLD_LIMIT);
}

#[test]
fn a_pdu_that_is_refused_for_itself_holds_up_nothing_else() {
    let mut scene = Scene::live();
    for ordering in 1..=8 {
        scene.event(ordering, "!a", 1);
    }
    let mut accepted = vec![];
    let mut tries = 0;
    while let Step::Send(pdus) = scene.next() {
        tries += 1;
        if !pdus.iter().any(|pdu| pdu.ordering.0 == 3) {
            accepted.extend(pdus.iter().map(|pdu| pdu.ordering.0));
            scene.accept();
        } else if scene.destination.refused() {
            assert_eq!(pdus.len(), 1);
            scene.accept(); // given up
        }
    }
    assert_eq!(accepted, [1, 2, 4, 5, 6, 7, 8]);
    assert!(tries < 12, "{tries}");
    assert_eq!(scene.last_successful(), 8);
    assert!(scene.outstanding.is_empty());
}

#[test]
fn a_destination_that_refuses_everything_fails() {
    let mut scene = Scene::live();
    for ordering in 1..=4 {
        scene.event(ordering, "!a", 1);
    }
    let mut sizes = vec![];
    loop {
        sizes.push(scene.sent().len());
        if scene.destination.refused() {
            break;
        }
    }
    assert_eq!(sizes, [4, 2, 1]);
    scene
        .destination
        .failed(RetryTimings::default(), &mut scene.outstanding);
    assert_eq!(scene.destination.unwritten().0[&RoomId::from("!a")], StreamOrdering(4));
    assert_eq!(scene.last_successful(), 0);
    assert!(scene.outstanding.is_empty());
}

#[test]
fn one_that_failed_is_caught_up_from_its_rows_once_it_is_due() {
    let mut scene = Scene::live();
    scene.event(1, "!a", 1);
    scene.event(2, "!b", 1);
    scene.sent();
    let retry = RetryTimings {
        last_tried: scene.now.wall,
        interval: 60_000,
        failing_since: Some(scene.now.wall),
    };
    scene.destination.failed(retry, &mut scene.outstanding);
    assert!(matches!(scene.next(), Step::BackOff(wait) if wait == Duration::from_mins(1)));
    scene.event(3, "!a", 1);
    assert!(
        scene.outstanding.is_empty(),
        "one that is behind never holds the cursor"
    );

    scene.pass(60_000);
    assert!(matches!(scene.next(), Step::Checkpoint));
    for (room, ordering) in [("!a", 3), ("!b", 2)] {
        scene.destination.wrote_owed(&room.into(), StreamOrdering(ordering));
    }
    let Step::CatchUp { after, up_to, .. } = scene.next() else {
        panic!()
    };
    assert_eq!((after, up_to), (StreamOrdering(0), StreamOrdering(3)));
    scene.destination.caught_up_to(StreamOrdering(2), scene.head, scene.now);
    scene.event(4, "!a", 1);
    assert_eq!(
        scene.outstanding.lowest(),
        Some(StreamOrdering(4)),
        "kept in memory now"
    );
    scene.destination.caught_up_to(StreamOrdering(3), scene.head, scene.now);
    assert!(scene.destination.caught_up(scene.head));
    assert_eq!(scene.sent(), [4]);
}

#[test]
fn too_old_or_too_many_is_behind() {
    let mut scene = Scene::live();
    scene.event(1, "!a", 1);
    scene.pass(10_000);
    scene.destination.enforce_age(LIMITS, scene.now, &mut scene.outstanding);
    assert!(scene.destination.is_live());
    scene.pass(1);
    scene.destination.enforce_age(LIMITS, scene.now, &mut scene.outstanding);
    assert!(!scene.destination.is_live());

    let mut scene = Scene::live();
    for ordering in 1..=1_000 {
        scene.event(ordering, "!a", 1);
    }
    assert!(scene.destination.is_live());
    scene.event(1_001, "!a", 1);
    assert!(!scene.destination.is_live());
    assert!(scene.outstanding.is_empty());
}

#[test]
fn one_that_takes_a_little_at_a_time_stays_live_for_a_while() {
    let mut scene = Scene::live();
    for ordering in 1..=1_000 {
        scene.event(ordering, "!a", 999);
    }
    let began = scene.now.at;
    while scene.destination.is_live() {
        scene.sent();
        scene.pass(9_000);
        scene.destination.enforce_age(LIMITS, scene.now, &mut scene.outstanding);
        scene.accept();
    }
    // What it accepts meanwhile makes the oldest that waits ever younger, but all were entered at once.
    assert!(scene.now.at - began > LIVE_LIMIT);
    assert!(scene.now.at - began < LIVE_LIMIT + Duration::from_secs(10));
}

#[test]
fn one_that_says_it_is_still_working_is_alive() {
    let mut scene = Scene::live();
    let record = DestinationRecord {
        last_successful: Some(StreamOrdering(0)),
        ..DestinationRecord::default()
    };
    scene.destination = Destination::new(&record, Limits { window: 10, ..LIMITS }, scene.now);
    scene.pass(1_000);
    for ordering in 1..=12 {
        scene.event(ordering, "!a", 1);
    }
    assert_eq!(scene.sent(), (1..=10).collect::<Vec<_>>());
    scene.accept();
    let began = scene.now.at;
    let mut questions = 0;
    loop {
        match scene.next() {
            Step::Ask { room, event } => {
                assert_eq!(event.as_str(), "$10");
                questions += 1;
                scene.destination.pace().asked(&room, Seen::NotYet, scene.now.at);
            }
            Step::Wait(until) => {
                scene.now.at = until;
                scene.destination.enforce_age(LIMITS, scene.now, &mut scene.outstanding);
                scene.event(13 + questions, "!b", 1);
            }
            Step::Send(pdus) if pdus[0].ordering.0 == 11 => break,
            Step::Send(pdus) => {
                assert!(pdus.iter().all(|pdu| pdu.pdu.room_id.as_str() == "!b"));
                scene.accept();
            }
            step => panic!("{step:?}"),
        }
        assert!(scene.destination.is_live());
    }
    assert!(questions > 10, "{questions}");
    assert_eq!(scene.now.at - began, Duration::from_secs(10));
}

#[test]
fn what_is_accepted_after_it_became_behind_still_counts() {
    let mut scene = Scene::live();
    for ordering in 1..=60 {
        scene.event(ordering, "!a", 1);
    }
    assert_eq!(scene.sent().len(), 50);
    scene.pass(10_001);
    scene.destination.enforce_age(LIMITS, scene.now, &mut scene.outstanding);
    assert!(!scene.destination.is_live());
    scene.accept();
    assert_eq!(scene.last_successful(), 50);
}

#[test]
fn one_never_reached_but_with_rows_is_owed_from_the_first_of_them() {
    let scene = Scene::new(&DestinationRecord {
        owed_from: Some(StreamOrdering(40)),
        owed_up_to: Some(StreamOrdering(90)),
        ..DestinationRecord::default()
    });
    assert!(!scene.destination.is_live());
    assert_eq!(scene.last_successful(), 39);
    assert_eq!(scene.destination.unwritten().1, Some(StreamOrdering(39)));
}
