//! `burdock demo`, as a newcomer runs it.

use std::{
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

fn demo(temporary: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_burdock"))
        .arg("demo")
        .args(arguments)
        .env("TMPDIR", temporary)
        .output()
        .expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn everything_owed_arrives_and_nothing_is_left_behind() {
    let temporary = tempfile::tempdir().expect("a folder");
    let began = Instant::now();
    let output = demo(temporary.path(), &["--seed", "7", "--servers", "4", "--sticky", "120"]);
    let (story, table) = (text(&output.stderr), text(&output.stdout));
    assert!(output.status.success(), "{story}{table}");
    assert!(began.elapsed() < Duration::from_secs(40), "{story}");
    assert!(story.contains("are killed") && story.contains("are back"), "{story}");

    let rows: Vec<Vec<&str>> = table
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows.len(), 4, "{table}");
    for row in &rows {
        // From the right: "1.23 s", transactions, expired, delivered, owed.
        let silent = row.contains(&"never");
        let figures: Vec<u32> = row.iter().rev().filter_map(|word| word.parse().ok()).collect();
        let [_, expired, delivered, owed] = figures[..4] else {
            panic!("{table}")
        };
        assert!(owed > 60 && expired < 60, "{table}");
        assert_eq!(delivered, if silent { 0 } else { owed }, "{table}");
    }
    let left: Vec<_> = std::fs::read_dir(temporary.path()).expect("readable").collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn what_is_asked_for_is_kept() {
    let temporary = tempfile::tempdir().expect("a folder");
    let keep = temporary.path().join("kept");
    let output = demo(temporary.path(), &["--sticky", "10", "--keep", &keep.to_string_lossy()]);
    assert!(
        output.status.success(),
        "{}{}",
        text(&output.stderr),
        text(&output.stdout)
    );
    assert!(keep.join("ours/homeserver.db").is_file() && keep.join("ours/log").is_file());
    let again = demo(temporary.path(), &["--keep", &keep.to_string_lossy()]);
    assert!(!again.status.success(), "what is there is not overwritten");
}

/// The processes whose arguments name something in `folder`.
fn processes_of(folder: &Path) -> usize {
    let folder = folder.to_string_lossy().into_owned();
    let processes = std::fs::read_dir("/proc").expect("Linux").flatten();
    processes
        .filter(|process| {
            let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            text(&line).contains(&folder)
        })
        .count()
}

fn within_seconds(what: &str, seconds: u64, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(seconds), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn whatever_ends_it_ends_its_homeserver_too() {
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let temporary = tempfile::tempdir().expect("a folder");
        let mut demo = Command::new(env!("CARGO_BIN_EXE_burdock"))
            .arg("demo")
            .env("TMPDIR", temporary.path())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        within_seconds("our homeserver starts", 10, || processes_of(temporary.path()) == 1);
        let pid = i32::try_from(demo.id())
            .ok()
            .and_then(Pid::from_raw)
            .expect("a process id");
        kill_process(pid, signal).expect("it is told");
        let status = demo.wait().expect("it ends");
        assert!(!status.success(), "{signal:?}");
        within_seconds("our homeserver ends", 15, || processes_of(temporary.path()) == 0);
        if signal != Signal::KILL {
            assert_eq!(
                std::fs::read_dir(temporary.path()).expect("readable").count(),
                0,
                "{signal:?}"
            );
        }
    }
}
