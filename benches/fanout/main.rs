//! How fast is Burdock, beside the sender it takes the place of?
//!
//! `tests/run bench` gives it what it needs: a real homeserver, and a room of it that hundreds of fake servers are in.
//! Both senders do the same work for the same room one after the other. Nothing is asserted of time, but everything
//! that was sent must arrive at every server.

#[path = "../../tests/fake_remote/mod.rs"]
#[expect(dead_code, reason = "the end-to-end cases need more of it")]
mod fake_remote;
mod measure;
#[path = "../../tests/e2e/rig/mod.rs"]
#[expect(dead_code, reason = "the end-to-end cases need more of it")]
mod rig;
mod sink;
mod table;
mod usage;

use std::{process::ExitCode, time::Instant};

use anyhow::{Context as _, Result, bail, ensure};
use sqlx::{Connection as _, PgConnection};
use tokio::signal::unix::SignalKind;

use self::{
    fake_remote::tls::{ADDRESSES, Certificates},
    rig::{Rig, client::RoomOptions, process, sender::Kind, services::Services},
    sink::Sink,
};

/// What is asked for on the command line.
#[derive(Debug, Clone, Copy)]
struct Options {
    /// Servers in the room.
    servers: u16,
    /// Events that pile up while the sender is halted.
    events: usize,
    /// Leave Synapse's sender out: for a look with a profiler.
    alone: bool,
}

impl Options {
    /// `None`: this is no `cargo bench`, only a run to see that it starts.
    fn from_args() -> Result<Option<Self>> {
        let mut options = Self {
            servers: 495,
            events: 200,
            alone: false,
        };
        let mut asked = false;
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument} needs a number"));
            match argument.as_str() {
                "--bench" => asked = true,
                "--servers" => options.servers = value()?.parse()?,
                "--events" => options.events = value()?.parse()?,
                "--alone" => options.alone = true,
                _ => bail!("unknown argument {argument}"),
            }
        }
        ensure!((1..=ADDRESSES).contains(&options.servers), "1 to {ADDRESSES} servers");
        ensure!(options.events > 0, "at least one event");
        Ok(asked.then_some(options))
    }
}

async fn run(services: Services, options: Options) -> Result<()> {
    let rig = Rig::start(services.clone()).await.context("the rig did not start")?;
    let measured = measure_both(&rig, &services, options).await;
    if measured.is_err() {
        eprintln!("{}", process::log_tails(&rig.dir()));
    }
    rig.stop().await;
    measured
}

async fn measure_both(rig: &Rig, services: &Services, options: Options) -> Result<()> {
    rig.hs2.stop().await; // not needed, and not to take time from the others
    let read = |file| std::fs::read_to_string(rig.dir().join(file));
    let certificates = Certificates {
        authority: read("ca.pem")?,
        certificate: read("cert.pem")?,
        key: read("key.pem")?,
    };
    let sink = Sink::start(options.servers, &certificates).await?;
    let room = rig.alice.create_room(RoomOptions::default()).await?;
    let start = Instant::now();
    for some in sink.servers.chunks(8) {
        let joins = some.iter().map(|server| server.join(&rig.hs1.resident, &room));
        futures_util::future::try_join_all(joins).await?;
    }
    eprintln!("{} servers joined in {:.0?}", options.servers, start.elapsed());
    forget_the_joins(services, &rig.hs1.store.database).await?;

    let mut columns = vec![];
    let all = [Kind::Python, Kind::Burdock];
    let kinds = if options.alone { &all[1..] } else { &all[..] };
    for kind in kinds {
        eprintln!("measuring {kind:?}");
        columns.push((*kind, measure::measure(rig, &sink, &room, *kind, options.events).await?));
    }
    table::print(options.servers, options.events, &columns);
    Ok(())
}

/// No sender ran while the servers joined, and to send each join to all that were there is not what is measured: the
/// sender starts behind them.
async fn forget_the_joins(services: &Services, database: &str) -> Result<()> {
    let mut connection = PgConnection::connect_with(&services.postgres().clone().database(database)).await?;
    sqlx::query("DELETE FROM federation_stream_position")
        .execute(&mut connection)
        .await?;
    let behind_them = sqlx::query(
        "INSERT INTO federation_stream_position (type, instance_name, stream_id)
         SELECT 'events', 'fed1', max(stream_ordering) FROM events UNION ALL SELECT 'federation', 'fed1', 0",
    );
    behind_them.execute(&mut connection).await?;
    Ok(())
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
    let options = match Options::from_args() {
        Ok(Some(options)) => options,
        Ok(None) => {
            eprintln!("skipped: nothing is measured without `cargo bench`");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    let services = match Services::from_env() {
        Ok(services) => services,
        Err(missing) => {
            eprintln!("skipped: {missing} (tests/run bench sets all that is needed)");
            return ExitCode::SUCCESS;
        }
    };
    let _ = rustls::crypto::ring::default_provider().install_default();
    let run = tokio::runtime::Runtime::new().map_err(Into::into).and_then(|runtime| {
        runtime.spawn(end_on_signal());
        runtime.block_on(run(services, options))
    });
    match run {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
