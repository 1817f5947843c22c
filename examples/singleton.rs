//! A service whose replicas all start this loop, and one of which runs it at a time.
//!
//! `cargo run --example singleton -- postgres://user@host/db`

#![allow(clippy::print_stdout, reason = "an example talks to the terminal")]

use std::error::Error;
use std::time::Duration;

use leasehold::{CancellationToken, Lease, Locker, Options, postgres};

fn tick(lease: &Lease) -> Result<(), Box<dyn Error + Send + Sync>> {
    println!("leading {} with token {}", lease.name(), lease.token());
    // Sleeps until the job should stop: cancelled, closing, or the lease lost.
    while !lease.wait_timeout(Duration::from_secs(1)) {
        lease.check()?;
        println!("tick, {:.1?} of the lease remaining", lease.remaining());
    }
    println!("stopping: {:?}", lease.cancellation().reason());
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("usage: singleton postgres://user@host/db")?;
    let config: postgres::Config = url.parse()?;
    let locker = Locker::new(config, Options::new().application_name("singleton"))?;
    let stop = CancellationToken::new();

    // A service would set the token from its signal handler; here, end of input does.
    let on_eof = stop.clone();
    std::thread::spawn(move || {
        let ended = std::io::read_to_string(std::io::stdin());
        on_eof.cancel();
        ended.map(drop)
    });

    locker.run(&stop, "singleton", tick).map_err(|error| error.to_string())?;
    locker.close();
    Ok(())
}
