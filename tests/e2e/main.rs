//! The end-to-end cases: a real homeserver, the sender under test, and those it sends to.
//!
//! `tests/run e2e` gives them what they need. One process, one rig, one case at a time; see `rig`.

#[path = "../fake_remote/mod.rs"]
mod fake_remote;
mod plain;
mod rig;

use std::{
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use futures_util::future::BoxFuture;
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::{runtime::Runtime, signal::unix::SignalKind, sync::Mutex};

use self::rig::{Rig, process, services::Services};

/// A case: what it is called, how long it may take, and what it does.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    deadline: Duration,
    run: for<'a> fn(&'a Rig) -> BoxFuture<'a, Result<()>>,
}

macro_rules! cases {
    ($($group:ident :: $name:ident within $seconds:literal s),* $(,)?) => {
        [$(Case {
            name: concat!(stringify!($group), "::", stringify!($name)),
            deadline: Duration::from_secs($seconds),
            run: |rig| Box::pin($group::$name(rig)),
        }),*]
    };
}

fn cases() -> impl IntoIterator<Item = Case> {
    cases![
        plain::python_a_plain_event_arrives within 60 s,
    ]
}

/// What all cases share: the rig is started for the first of them.
struct Bench {
    runtime: Runtime,
    rig: Mutex<Option<Rig>>,
}

impl Bench {
    fn run(&self, case: Case, services: &Services) -> Result<(), Failed> {
        self.runtime.block_on(async {
            let mut rig = self.rig.lock().await;
            if rig.is_none() {
                *rig = Some(Rig::start(services.clone()).await.context("the rig did not start")?);
            }
            let rig = rig.as_ref().context("no rig")?;
            rig.heal()
                .await
                .context("the rig could not be put right after the last case")?;
            let start = Instant::now();
            let outcome = match tokio::time::timeout(case.deadline, (case.run)(rig)).await {
                Ok(outcome) => outcome,
                Err(_) => Err(anyhow::anyhow!("not done after {:?}", case.deadline)),
            };
            eprintln!("{}: {:.1} s", case.name, start.elapsed().as_secs_f32());
            outcome.map_err(|error| Failed::from(format!("{error:#}\n{}", process::log_tails(&rig.dir()))))
        })
    }
}

/// Ends all processes when we are told to end.
async fn end_on_signal() -> std::io::Result<()> {
    let mut interrupt = tokio::signal::unix::signal(SignalKind::interrupt())?;
    let mut terminate = tokio::signal::unix::signal(SignalKind::terminate())?;
    let status = tokio::select! {
        _ = interrupt.recv() => 130,
        _ = terminate.recv() => 143,
    };
    process::kill_all();
    std::process::exit(status)
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let services = match Services::from_env() {
        Ok(services) => services,
        Err(missing) => {
            eprintln!("skipped: the end-to-end cases, since {missing} (tests/run sets all they need)");
            return ExitCode::SUCCESS;
        }
    };
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = match Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("no runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    runtime.spawn(end_on_signal());
    let bench = Arc::new(Bench {
        runtime,
        rig: Mutex::default(),
    });
    let trials = cases().into_iter().map(|case| {
        let (bench, services) = (bench.clone(), services.clone());
        Trial::test(case.name, move || bench.run(case, &services))
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    bench.runtime.block_on(async {
        if let Some(rig) = bench.rig.lock().await.take() {
            rig.stop().await;
        }
    });
    conclusion.exit_code()
}
