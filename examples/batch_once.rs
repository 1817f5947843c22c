//! A batch that cron starts on every host, and that runs on the first one.
//!
//! `cargo run --example batch_once -- postgres://user@host/db`
//!
//! Exits with 0 if the batch ran here or runs elsewhere, with 1 if it failed.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example talks to the terminal")]

use std::process::ExitCode;
use std::time::Duration;

use leasehold::{CancellationToken, Error, Lease, Locker, Options, RunError, postgres};

/// Works through the night's invoices in steps; between two steps it may stop.
fn nightly(lease: &Lease) -> Result<u32, Error> {
    let mut done = 0;
    for _invoice in 0..20 {
        lease.check()?;
        std::thread::sleep(Duration::from_millis(25));
        done += 1;
    }
    Ok(done)
}

fn main() -> ExitCode {
    let Some(url) = std::env::args().nth(1) else {
        eprintln!("usage: batch_once postgres://user@host/db");
        return ExitCode::FAILURE;
    };
    let outcome =
        url.parse::<postgres::Config>().map_err(|error| error.to_string()).and_then(|config| {
            let locker = Locker::new(config, Options::new()).map_err(|error| error.chain())?;
            let outcome = locker.try_run(&CancellationToken::new(), "nightly-batch", nightly);
            locker.close();
            outcome.map_err(|error| match error {
                RunError::Job(error) | RunError::Lock(error) => error.chain(),
            })
        });
    match outcome {
        Ok(Some(done)) => println!("done: {done} invoices"),
        Ok(None) => println!("runs on another host"),
        Err(error) => {
            eprintln!("failed: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
