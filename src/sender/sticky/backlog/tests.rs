use super::*;

fn row(room: &str, position: i64, recent_join: Option<&str>) -> BacklogRow {
    BacklogRow {
        room_id: room.into(),
        position: StickyPosition(position),
        recent_join: recent_join.map(Into::into),
    }
}

fn push(room: &str, position: i64, limit: usize, unlisted: u32) -> BacklogStep {
    BacklogStep::Push {
        room: room.into(),
        position: StickyPosition(position),
        limit,
        unlisted,
    }
}

fn probe(room: &str, event: &str) -> BacklogStep {
    BacklogStep::Probe {
        room: room.into(),
        event: event.into(),
    }
}

#[test]
fn rooms_take_turns() {
    let now = Instant::now();
    let mut backlog = Backlog::default();
    assert_eq!(backlog.next(now), BacklogStep::Load);
    backlog.loaded(vec![row("!a", 5, None), row("!b", 7, None)], now);
    assert_eq!(backlog.next(now), push("!a", 5, PAGE, 0));
    backlog.advanced(&"!a".into(), StickyPosition(55), None, now);
    assert_eq!(backlog.next(now), push("!b", 7, PAGE, 0));
    backlog.finished(&"!b".into());
    assert_eq!(backlog.next(now), push("!a", 55, PAGE, 0));
    backlog.finished(&"!a".into());
    assert_eq!(backlog.next(now), BacklogStep::Nothing);
}

#[test]
fn a_joiner_is_asked_for_a_minute_and_then_pushed_to() {
    let start = Instant::now();
    let mut backlog = Backlog::default();
    backlog.loaded(vec![row("!a", 5, Some("$join"))], start);
    let mut now = start;
    let mut asked_at = vec![];
    loop {
        match backlog.next(now) {
            BacklogStep::Probe { room, event } => {
                assert_eq!(event.as_str(), "$join");
                asked_at.push(now.duration_since(start).as_millis());
                backlog.probed(&room, false, now);
            }
            BacklogStep::Wait(until) => now = until,
            step => {
                assert_eq!(step, push("!a", 5, 1, 0));
                break;
            }
        }
    }
    assert_eq!(asked_at[..4], [0, 250, 750, 1_250]);
    assert_eq!(asked_at.len(), 122);
    assert_eq!(asked_at.last(), Some(&60_000));
}

#[test]
fn a_joiner_gets_one_event_first_and_each_page_waits_for_the_one_before() {
    let start = Instant::now();
    let room = RoomId::from("!a");
    let mut backlog = Backlog::default();
    backlog.recorded(&room, start);
    assert_eq!(backlog.moved(&room), Some(start));
    assert_eq!(backlog.next(start), BacklogStep::Load);
    backlog.loaded(vec![row("!a", 5, Some("$join"))], start);
    assert_eq!(backlog.next(start), probe("!a", "$join"));
    backlog.probed(&room, true, start);
    assert_eq!(backlog.next(start), push("!a", 5, 1, 0));
    backlog.advanced(&room, StickyPosition(6), Some("$5".into()), start);
    assert_eq!(backlog.next(start), probe("!a", "$5"));
    backlog.probed(&room, true, start);
    assert_eq!(backlog.next(start), push("!a", 6, PAGE, 0));
    backlog.advanced(&room, StickyPosition(56), Some("$55".into()), start);

    // It never says that it has that one: the next page follows all the same.
    let mut now = start;
    while backlog.next(now) != push("!a", 56, PAGE, 0) {
        match backlog.next(now) {
            BacklogStep::Probe { room, .. } => backlog.probed(&room, false, now),
            BacklogStep::Wait(until) => now = until,
            step => panic!("{step:?}"),
        }
    }
    assert_eq!(now - start, PAGE_LIMIT);
}

#[test]
fn one_that_joins_anew_is_waited_for_anew() {
    let now = Instant::now();
    let room = RoomId::from("!a");
    let mut backlog = Backlog::default();
    backlog.loaded(vec![row("!a", 5, Some("$first"))], now);
    backlog.probed(&room, true, now);
    backlog.loaded(vec![row("!a", 5, Some("$first"))], now);
    assert_eq!(backlog.next(now), push("!a", 5, 1, 0));
    backlog.loaded(vec![row("!a", 5, Some("$second"))], now);
    assert_eq!(backlog.next(now), probe("!a", "$second"));
}

#[test]
fn a_row_recorded_during_a_look_is_not_forgotten_by_it() {
    let now = Instant::now();
    let mut backlog = Backlog::default();
    assert_eq!(backlog.next(now), BacklogStep::Load);
    backlog.recorded(&"!a".into(), now);
    backlog.loaded(vec![], now);
    assert_eq!(backlog.moved(&"!a".into()), Some(now));
    assert_eq!(backlog.next(now), BacklogStep::Load);
    backlog.loaded(vec![row("!a", 5, None)], now);
    assert_eq!(backlog.next(now), push("!a", 5, PAGE, 0));
    backlog.finished(&"!a".into());
    assert_eq!(backlog.next(now), BacklogStep::Nothing);
}

#[test]
fn what_an_answer_leaves_out_is_sent_again_later_and_others_go_on_meanwhile() {
    let now = Instant::now();
    let mut backlog = Backlog::default();
    backlog.loaded(vec![row("!a", 5, None), row("!b", 7, None)], now);
    assert_eq!(backlog.next(now), push("!a", 5, PAGE, 0));
    backlog.left_out(&"!a".into(), StickyPosition(6), 1, now);
    assert_eq!(backlog.next(now), push("!b", 7, PAGE, 0));
    backlog.finished(&"!b".into());
    let BacklogStep::Wait(until) = backlog.next(now) else {
        panic!()
    };
    assert_eq!(until.duration_since(now), Duration::from_millis(500));
    assert_eq!(backlog.next(until), push("!a", 6, PAGE, 1));
}

#[test]
fn a_row_that_went_back_is_sent_from_there_and_a_row_that_went_is_forgotten() {
    let now = Instant::now();
    let mut backlog = Backlog::default();
    backlog.loaded(vec![row("!a", 50, None), row("!b", 7, None)], now);
    backlog.look_again();
    assert_eq!(backlog.next(now), BacklogStep::Load);
    backlog.loaded(vec![row("!a", 5, None)], now);
    assert_eq!(backlog.next(now), push("!a", 5, PAGE, 0));
    assert_eq!(backlog.moved(&"!b".into()), None);
}

#[test]
fn a_joiner_gets_no_page_before_it_is_seen_to_have_an_event() {
    let now = Instant::now();
    let room = RoomId::from("!a");
    let mut backlog = Backlog::default();
    backlog.loaded(vec![row("!a", 5, Some("$join"))], now);
    backlog.probed(&room, true, now);
    // The first was expired, the second left out.
    backlog.advanced(&room, StickyPosition(6), None, now);
    assert_eq!(backlog.next(now), push("!a", 6, 1, 0));
    backlog.left_out(&room, StickyPosition(6), 1, now);
    let later = now + Duration::from_millis(500);
    assert_eq!(backlog.next(later), push("!a", 6, 1, 1));
}

#[test]
fn a_smaller_page_is_still_counted_as_left_out() {
    let now = Instant::now();
    let room = RoomId::from("!a");
    let mut backlog = Backlog::default();
    backlog.loaded(vec![row("!a", 5, None)], now);
    backlog.left_out(&room, StickyPosition(5), 3, now);
    backlog.fewer(&room, StickyPosition(5), 3, 25, now);
    assert_eq!(backlog.next(now), push("!a", 5, 25, 3));
}
