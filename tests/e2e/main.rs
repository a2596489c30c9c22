//! The end-to-end cases: a real homeserver, the sender under test, and those it sends to.
//!
//! `tests/run e2e` gives them what they need. One process, one rig, one case at a time; see `rig`.

#[path = "../fake_remote/mod.rs"]
mod fake_remote;
mod handover;
mod instances;
mod kill;
mod outage;
mod plain;
mod restarts;
mod rig;
mod sticky;

use std::{
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use futures_util::future::LocalBoxFuture;
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::{runtime::Runtime, signal::unix::SignalKind, sync::Mutex};

use self::rig::{Rig, process, services::Services};

/// A case: what it is called, how long it may take, and what it does.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    deadline: Duration,
    run: for<'a> fn(&'a Rig) -> LocalBoxFuture<'a, Result<()>>,
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
        plain::synapses_own_sender_delivers within 60 s,
        plain::an_event_arrives within 60 s,
        plain::many_that_piled_up_all_arrive within 180 s,
        plain::synapse_hears_how_a_server_fares within 60 s,
        plain::a_ban_of_a_servers_last_user_arrives_there within 60 s,
        plain::nothing_arrives_after_a_server_left within 60 s,
        plain::the_withdrawal_of_an_invitation_arrives within 30 s,
        plain::servers_that_misbehave_hold_up_no_other within 90 s,
        sticky::all_that_live_reach_a_new_server within 120 s,
        sticky::so_they_do_under_joined_visibility_and_with_live_traffic within 150 s,
        sticky::a_server_that_joined_through_another_gets_them within 60 s,
        sticky::one_made_between_make_join_and_send_join_reaches_the_joiner within 30 s,
        sticky::those_made_while_servers_join_reach_them within 60 s,
        sticky::a_joiner_that_is_not_ready_is_waited_for within 30 s,
        sticky::those_that_an_answer_leaves_out_are_sent_again within 60 s,
        sticky::a_server_that_left_again_gets_none within 30 s,
        sticky::a_join_while_we_were_away_is_found within 45 s,
        outage::a_server_that_was_away_gets_all_sticky_events_and_the_newest_of_each_room within 120 s,
        outage::a_server_that_was_away_for_a_moment_gets_every_event within 60 s,
        handover::synapses_own_sender_takes_over_in_mid_backlog within 180 s,
        handover::burdock_takes_over_from_it_in_mid_backlog within 150 s,
        handover::they_take_turns_under_traffic within 90 s,
        instances::the_set_changes_from_one_to_two_and_back_under_traffic within 90 s,
        restarts::redis within 120 s,
        restarts::postgresql within 120 s,
        restarts::synapses_main_process within 150 s,
        kill::every_event_reaches_every_server_all_the_same within 240 s,
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
