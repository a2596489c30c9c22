//! The figures as a table.

use std::time::Duration;

use super::measure::{Figures, Throughput};
use crate::rig::sender::Kind;

/// Prints a column for each sender.
pub fn print(servers: u16, events: usize, columns: &[(Kind, Figures)]) {
    let line = |what: &str, figure: &dyn Fn(&Figures) -> String| {
        let figures: Vec<_> = columns
            .iter()
            .map(|(_, figures)| format!("{:>16}", figure(figures)))
            .collect();
        println!("| {what:<52} | {} |", figures.join(" | "));
    };
    println!("{servers} servers in the room\n");
    let heads: Vec<_> = columns.iter().map(|(kind, _)| format!("{:>16}", name(*kind))).collect();
    println!("| {:<52} | {} |", "", heads.join(" | "));
    println!("| {:-<52} |{}", "", format!(" {:->16} |", ":").repeat(columns.len()));
    line("1 event, no connections: answer to last receipt", &|f| ms(f.cold));
    line("1 event, connections warm: median", &|f| ms(f.warm[f.warm.len() / 2]));
    line("its best and worst", &|f| {
        format!("{} - {}", ms(f.warm[0]), ms(f.warm[f.warm.len() - 1]))
    });
    line("20 events: the client's requests took", &|f| ms(f.burst_client));
    let throughput = |what: &str, of: &dyn Fn(&Figures) -> &Throughput| {
        line(&format!("{what}: to last receipt"), &|f| ms(of(f).time));
        line("PDUs", &|f| of(f).pdus.to_string());
        line("transactions", &|f| of(f).transactions.to_string());
        line("PDUs a transaction", &|f| {
            let Throughput { pdus, transactions, .. } = of(f);
            format!("{:.1}", f64::from(*pdus) / f64::from(*transactions))
        });
        line("PDUs a second", &|f| {
            format!("{:.0}", f64::from(of(f).pdus) / of(f).time.as_secs_f64())
        });
        line("sender's CPU", &|f| ms(of(f).cpu));
        line("sender's CPU a transaction", &|f| us(of(f).cpu / of(f).transactions));
        line("sender's CPU a PDU", &|f| us(of(f).cpu / of(f).pdus));
    };
    throughput("20 events", &|f| &f.burst);
    throughput(&format!("{events} events piled up"), &|f| &f.piled_up);
    line("resident memory in the end", &|f| format!("{} MB", f.memory / 1024));
}

fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Python => "Synapse's sender",
        Kind::Burdock => "Burdock",
    }
}

fn ms(time: Duration) -> String {
    format!("{} ms", time.as_millis())
}

fn us(time: Duration) -> String {
    format!("{} µs", time.as_micros())
}
