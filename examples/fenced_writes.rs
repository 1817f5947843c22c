//! A billing run that bills each invoice once, though its leader is superseded in the middle.
//!
//! `cargo run --example fenced_writes -- postgres://user@host/db`

#![allow(clippy::print_stdout, reason = "an example talks to the terminal")]

use std::error::Error;
use std::time::Duration;

use leasehold::postgres::{Client, Config, NoTls};
use leasehold::{CancellationToken, Lease, Locker, Options};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Bills what is not billed yet, each invoice in a guarded transaction of its own. Restartable: it
/// picks up where the table says.
fn bill(who: &str, config: &Config, lease: &Lease, after_each: &dyn Fn()) -> Outcome<()> {
    let mut client = config.connect(NoTls)?;
    loop {
        let mut transaction = client.transaction()?;
        let next = "SELECT id FROM demo_invoices WHERE billed_by IS NULL ORDER BY id LIMIT 1";
        let Some(row) = transaction.query_opt(next, &[])? else { return Ok(()) };
        let id: i32 = row.get(0);
        after_each();
        // From here on the transaction commits within this term, or not at all.
        if let Err(error) = lease.guard(&mut transaction) {
            println!("{who}: invoice {id} refused, {error}");
            return Err(error.into());
        }
        let billed = "UPDATE demo_invoices SET billed_by = $1, fence = $2 WHERE id = $3";
        transaction.execute(billed, &[&who, &lease.token().as_i64(), &id])?;
        transaction.commit()?;
        println!("{who}: invoice {id} billed, token {}", lease.token());
    }
}

fn main() -> Outcome<()> {
    let url = std::env::args().nth(1).ok_or("usage: fenced_writes postgres://user@host/db")?;
    let config: Config = url.parse()?;
    let mut admin: Client = config.connect(NoTls)?;
    admin.batch_execute(
        "DROP TABLE IF EXISTS demo_invoices;
         CREATE TABLE demo_invoices (id int PRIMARY KEY, billed_by text, fence bigint);
         INSERT INTO demo_invoices SELECT generate_series(1, 6)",
    )?;
    let (first, second) = (
        Locker::new(config.clone(), Options::new())?,
        Locker::new(config.clone(), Options::new())?,
    );
    let stop = CancellationToken::new();
    let step = || std::thread::sleep(Duration::from_millis(100));
    std::thread::scope(|scope| -> Outcome<()> {
        // `try_run`, so that the superseded leader is not called again.
        let leader = scope.spawn(|| {
            let job = |lease: &Lease| bill("first", &config, lease, &step);
            first.try_run(&stop, "billing", job).map(drop).map_err(|error| error.to_string())
        });
        std::thread::sleep(Duration::from_millis(250));
        let holder = second.holder("billing")?.ok_or("nobody leads")?;
        println!("admin: ends session {} of the first leader", holder.pid);
        admin.execute("SELECT pg_terminate_backend($1)", &[&holder.pid])?;
        let job = |lease: &Lease| bill("second", &config, lease, &step);
        second.run(&stop, "billing", job).map_err(|error| error.to_string())?;
        println!("first: {:?}", leader.join().map_err(|_| "panicked")?);
        Ok(())
    })?;
    let left: i64 =
        admin.query_one("SELECT count(*) FROM demo_invoices WHERE billed_by IS NULL", &[])?.get(0);
    println!("not billed: {left}");
    Ok(())
}
