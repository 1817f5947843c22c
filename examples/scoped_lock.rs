//! Several processes rebuild one index, one at a time, each in its turn.
//!
//! `cargo run --example scoped_lock -- postgres://user@host/db` in two terminals at once.

#![allow(clippy::print_stdout, reason = "an example talks to the terminal")]

use std::error::Error;
use std::time::Duration;

use leasehold::CancellationToken;
use leasehold::lock::{LockConfig, ScopeError, ScopedLocker};

/// Runs on the calling thread, under the lock.
fn rebuild() -> Result<u32, std::io::Error> {
    std::thread::sleep(Duration::from_secs(3));
    Ok(42)
}

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("usage: scoped_lock postgres://user@host/db")?;
    let options = LockConfig::new().application_name("scoped_lock");
    let locks = ScopedLocker::new(url.parse()?, options)?;

    // A service would set the token from its signal handler; here, end of input does.
    let stop = CancellationToken::new();
    let on_eof = stop.clone();
    std::thread::spawn(move || {
        let ended = std::io::read_to_string(std::io::stdin());
        on_eof.cancel();
        ended.map(drop)
    });

    // Is it free? Then there is nothing to wait for.
    if let Some(pages) = locks.try_with_lock("rebuild-index", rebuild)? {
        println!("free, and rebuilt at once: {pages} pages");
        return Ok(());
    }
    println!("somebody else rebuilds; waiting in the queue");
    match locks.with_lock(&stop, "rebuild-index", rebuild) {
        Ok(pages) => println!("rebuilt: {pages} pages"),
        Err(ScopeError::Lock(leasehold::Error::Cancelled)) => println!("stopped while waiting"),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
