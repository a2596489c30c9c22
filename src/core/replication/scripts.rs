//! The reader, line by line: the run of the reference, batches, gaps, retries, bounds, commands.

use super::{
    command::Command,
    gap::{CacheInvalidation, page_of_caches},
    reader::{Action, Input, Reader, Role},
};
use crate::core::{clock::Millis, id::Token};

/// Both streams' positions at start-up.
const START: i64 = 10;

/// What a reader does about these lines.
fn drive(reader: &mut Reader, lines: &[&str]) -> Vec<Action> {
    let lines = lines.iter().map(|line| Input::Line((*line).to_owned()));
    lines.flat_map(|line| reader.handle(line, Millis(0))).collect()
}

fn connected() -> Reader {
    connected_as("fs1", Role::Sender)
}

fn connected_as(me: &str, role: Role) -> Reader {
    let mut reader = Reader::new(me.into(), role, Token(START));
    assert!(
        reader.handle(Input::Subscribed, Millis(0)).is_empty(),
        "nobody would hear it"
    );
    let actions = reader.handle(Input::OutboundUp, Millis(0));
    assert!(matches!(
        actions[..],
        [Action::Publish(Command::Replicate), Action::Announce]
    ));
    reader
}

fn short(actions: &[Action]) -> Vec<String> {
    let text = |action: &Action| match action {
        Action::Publish(command) => command.to_string(),
        Action::Announce => "announce".to_owned(),
        Action::Fetch(fetch) => format!("fetch {} {}..{}", fetch.stream.name(), fetch.from, fetch.to),
        Action::Rows { stream, group, .. } => format!("rows {} {} {}", stream.name(), group.token, group.rows.len()),
        Action::Reached { stream, writer, token } => format!("{} {writer} {token}", stream.name()),
        Action::ServerUp(server) => format!("up {server}"),
        Action::NewServerJoined(server) => format!("joined {server}"),
        Action::TwinAlive => "twin".to_owned(),
        Action::FederationAck(instance, token) => format!("ack {instance} {token}"),
        Action::UserSync(instance, device, syncing, at) => {
            format!("sync {instance} {} {syncing} {}", device.user_id, at.0)
        }
        Action::ClearUserSync(instance) => format!("clear {instance}"),
    };
    actions.iter().map(text).collect()
}

/// Answers the one page asked for.
fn answer(reader: &mut Reader, actions: &[Action], tokens: &[i64]) -> Vec<Action> {
    let Some(Action::Fetch(fetch)) = actions.iter().find(|action| matches!(action, Action::Fetch(_))) else {
        panic!("no page asked for: {:?}", short(actions));
    };
    let rows: Vec<_> = tokens
        .iter()
        .map(|token| CacheInvalidation {
            token: Token(*token),
            func: "f".to_owned(),
            keys: None,
            at: None,
        })
        .collect();
    let page = page_of_caches(fetch, &rows).unwrap();
    reader.handle(Input::Fetched(fetch.clone(), page), Millis(0))
}

#[test]
fn the_run_of_the_reference_on_the_federation_stream() {
    let mut reader = connected();
    let row = |token: &str| format!(r#"RDATA federation master {token} ["e",{{}}]"#);
    assert!(drive(&mut reader, &[&row("1")]).is_empty(), "before any POSITION");
    assert_eq!(
        short(&drive(&mut reader, &["POSITION federation master 0 0"])),
        ["FEDERATION_ACK fs1 0"]
    );
    assert_eq!(
        short(&drive(&mut reader, &[&row("1")])),
        ["rows federation 1 1", "FEDERATION_ACK fs1 1"]
    );
    let actions = drive(&mut reader, &["POSITION federation master 3 3", &row("4")]);
    assert_eq!(short(&actions), ["fetch federation 0..3"], "4 waits its turn");
    assert_eq!(
        short(&answer(&mut reader, &actions, &[1, 2, 3])),
        [
            "rows federation 1 1",
            "rows federation 2 1",
            "rows federation 3 1",
            "FEDERATION_ACK fs1 3",
            "rows federation 4 1",
            "FEDERATION_ACK fs1 4",
        ]
    );
    let actions = drive(&mut reader, &[&row("batch"), &row("batch"), &row("6")]);
    assert_eq!(short(&actions), ["rows federation 6 3", "FEDERATION_ACK fs1 6"]);
    let actions = drive(&mut reader, &[&row("batch"), "POSITION federation master 7 7"]);
    assert_eq!(short(&actions), ["fetch federation 0..7"], "the batch is forgotten");
    answer(&mut reader, &actions, &[]);
    // The main process restarted: its position is lower, and acknowledged as it is.
    assert_eq!(
        short(&drive(&mut reader, &["POSITION federation master 0 0"])),
        ["FEDERATION_ACK fs1 0"]
    );
}

#[test]
fn batches_of_two_writers_do_not_mix_and_old_rows_are_dropped() {
    let mut reader = connected();
    let actions = drive(
        &mut reader,
        &[
            "POSITION caches master 10 10",
            "POSITION caches w1 4 4",
            r#"RDATA caches master batch ["a",null,1]"#,
            r#"RDATA caches w1 11 ["b",null,1]"#,
            r#"RDATA caches master 12 ["c",null,1]"#,
            r#"RDATA caches master 12 ["c",null,1]"#,
            r#"RDATA caches fs1 13 ["own",null,1]"#,
            "POSITION caches fs1 99 99",
            "POSITION caches master 12 12",
            r#"RDATA unheard_of master 13 ["d"]"#,
            "POSITION unheard_of master 13 13",
        ],
    );
    assert_eq!(short(&actions), ["rows caches 11 1", "rows caches 12 2"]);
}

#[test]
fn a_page_that_fails_is_asked_for_again_and_again() {
    let mut reader = connected();
    let mut actions = drive(&mut reader, &["POSITION caches master 20 20"]);
    let mut now = 0;
    for pause in [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000] {
        let Some(Action::Fetch(fetch)) = actions.pop() else {
            panic!("no page asked for")
        };
        assert_eq!((fetch.from, fetch.to), (Token(10), Token(20)));
        assert!(reader.handle(Input::FetchFailed(fetch.clone()), Millis(now)).is_empty());
        assert_eq!(reader.wake_at(), Some(Millis(now + pause)));
        assert!(reader.handle(Input::Tick, Millis(now + pause - 1)).is_empty());
        now += pause;
        actions = reader.handle(Input::Tick, Millis(now));
        let Some(Action::Fetch(again)) = actions.last() else {
            panic!("not asked again")
        };
        assert_eq!(*again, fetch, "under the same key");
    }
    assert_eq!(short(&answer(&mut reader, &actions, &[15])), ["rows caches 15 1"]);
    assert_eq!(reader.wake_at(), None);
}

#[test]
fn too_much_behind_a_gap_is_fetched_instead() {
    let mut reader = connected();
    let actions = drive(&mut reader, &["POSITION caches master 20 20"]);
    let big = "x".repeat(3_000_000);
    for token in 21..40 {
        assert!(
            drive(
                &mut reader,
                &[&format!(r#"RDATA caches master {token} ["{big}",null,1]"#)]
            )
            .is_empty()
        );
    }
    assert_eq!(short(&answer(&mut reader, &actions, &[])), ["REPLICATE "]);
    assert!(
        drive(&mut reader, &[r#"RDATA caches master 40 ["f",null,1]"#]).is_empty(),
        "closed"
    );
    assert_eq!(
        short(&drive(&mut reader, &["POSITION caches master 40 40"])),
        ["fetch caches 20..40"]
    );
}

#[test]
fn a_line_that_is_too_long_opens_all_gaps() {
    let mut reader = connected();
    drive(&mut reader, &["POSITION caches master 10 10"]);
    let line = format!(r#"RDATA caches master 11 ["{}",null,1]"#, "x".repeat(5_000_000));
    assert_eq!(short(&drive(&mut reader, &[&line])), ["REPLICATE ", "announce"]);
    assert_eq!(
        short(&drive(&mut reader, &["POSITION caches master 11 11"])),
        ["fetch caches 10..11"]
    );
}

#[test]
fn commands_are_heard_and_a_twin_is_told_from_an_echo() {
    let mut reader = connected();
    assert_eq!(
        short(&drive(
            &mut reader,
            &[
                "REMOTE_SERVER_UP a.example",
                "NEW_SERVER_JOINED b.example x",
                "REPLICATE ",
                "NONSENSE",
                "RDATA x"
            ]
        )),
        ["up a.example", "joined b.example", "announce"]
    );
    let position = "POSITION federation master 0 0";
    drive(&mut reader, &[position, position]);
    let echo = "FEDERATION_ACK fs1 0";
    assert!(drive(&mut reader, &[echo, "FEDERATION_ACK fs2 0", echo]).is_empty());
    assert_eq!(short(&drive(&mut reader, &[echo])), ["twin"]);

    // An echo is lost with the connection: it is no reason to take a later one for a twin's, nor to hide a twin for ever.
    drive(&mut reader, &[position]);
    reader.handle(Input::Lost, Millis(0));
    assert_eq!(reader.handle(Input::Subscribed, Millis(700_000)).len(), 2);
    drive(&mut reader, &[position]);
    assert!(drive(&mut reader, &[echo]).is_empty());
    assert_eq!(short(&drive(&mut reader, &[echo])), ["twin"]);
}

#[test]
fn a_master_hears_what_is_for_it_and_a_sender_does_not() {
    let lines = [
        "POSITION events persister 10 12",
        "POSITION sticky_events persister 0 4",
        "POSITION federation master 0 5",
        r#"RDATA events master 13 ["ev",[]]"#,
        "FEDERATION_ACK fs2 3",
        "USER_SYNC qWeRt @ann:example.com None start 7",
        "CLEAR_USER_SYNC qWeRt",
        "REMOTE_SERVER_UP a.example",
    ];
    let both = ["events persister 12", "sticky_events persister 4"];
    let mut master = connected_as("master", Role::Master);
    let for_it = [
        "ack fs2 3",
        "sync qWeRt @ann:example.com true 7",
        "clear qWeRt",
        "up a.example",
    ];
    assert_eq!(short(&drive(&mut master, &lines)), [&both[..], &for_it].concat());
    let mut sender = connected();
    let for_it = ["FEDERATION_ACK fs1 5", "up a.example"];
    assert_eq!(short(&drive(&mut sender, &lines)), [&both[..], &for_it].concat());
}
