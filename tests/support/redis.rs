//! A Redis of a test's own, which it can stop and start.

#![allow(dead_code, reason = "each test program uses a part")]

use std::{
    io::{BufRead, BufReader},
    net::TcpListener,
    process::{Child, Command, Stdio},
};

/// A Redis of our own, stopped with this value.
pub struct OwnRedis(Child);

impl OwnRedis {
    /// Starts it. `None` if there is no `redis-server`.
    pub fn start(port: u16) -> Option<Self> {
        Self::start_with(port, &[])
    }

    /// The same with further options.
    pub fn start_with(port: u16, further: &[&str]) -> Option<Self> {
        let mut server = Command::new("redis-server");
        server.args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]);
        server.args(further);
        let mut child = server.stdout(Stdio::piped()).spawn().ok()?;
        let mut output = BufReader::new(child.stdout.take()?);
        let mut line = String::new();
        while !line.contains("Ready to accept connections") {
            line.clear();
            assert_ne!(output.read_line(&mut line).unwrap(), 0, "redis-server did not start");
        }
        // It must be able to go on writing.
        std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
        Some(Self(child))
    }
}

impl Drop for OwnRedis {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port nobody listens on.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
