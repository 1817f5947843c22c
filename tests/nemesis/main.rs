//! Many processes contend for several leases while a nemesis breaks what it can; then a checker
//! decides from the history which promises were kept. `scripts/nemesis` runs it for longer.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    unreachable_pub,
    reason = "a test that cannot go on fails, and says where; a verdict is printed; nothing uses a \
              test binary from outside"
)]

mod checker;
mod draw;
mod planted;
mod record;
mod replica;
#[allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "several binaries use a part of it each"
)]
#[path = "../support/mod.rs"]
mod support;
mod terms;
mod verdict;
mod world;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use checker::{Limits, Run};
use draw::draw;
use world::{Active, World};

/// Faults in place at the same time.
const AT_ONCE: usize = 2;
/// Our own thread sleeps this long again and again, and notes when it woke up late.
const PULSE: Duration = Duration::from_millis(5);
const HICCUP: Duration = Duration::from_millis(5);

fn number(key: &str, default: u64) -> u64 {
    std::env::var(key).map_or(default, |text| text.parse().expect("a number"))
}

/// Without settings a short run, so that the nemesis itself is always tried.
#[test]
fn every_promise_is_kept_whatever_the_nemesis_does() {
    if support::child::role().is_some() {
        return;
    }
    let seed = number("LEASEHOLD_NEMESIS_SEED", 1);
    let length = Duration::from_secs(number("LEASEHOLD_NEMESIS_SECONDS", 15));
    let slots = usize::try_from(number("LEASEHOLD_NEMESIS_PROCESSES", 5)).unwrap();
    let names = usize::try_from(number("LEASEHOLD_NEMESIS_NAMES", 4)).unwrap();
    let verdict = nemesis(seed, length, slots, names);
    assert!(verdict.violations.is_empty(), "seed {seed}:\n{verdict}");
}

fn nemesis(seed: u64, length: Duration, slots: usize, names: usize) -> verdict::Verdict {
    println!("nemesis: seed {seed}, {} s, {slots} processes, {names} names", length.as_secs());
    let mut world = World::new(slots, names);
    if world.network.is_none() {
        println!("nemesis: not root, so no wire is cut and no packet lost");
    }
    let pulse = Pulse::start();
    // Replicas settle before the first fault.
    std::thread::sleep(Duration::from_secs(2));
    let faults = rage(&mut world, seed, Instant::now() + length);
    let healed = record::now();
    let limits = limits(&mut world);
    std::thread::sleep(Duration::from_nanos(limits.liveness()) + Duration::from_secs(1));
    let ended = record::now();
    world.hang_up();
    // Half a minute where only keepalives end the session of a process that died behind a cut wire.
    let bound = if limits.idle_limit { 6 } else { 30 };
    let leaked = world.leaks(Duration::from_secs(bound));
    let (records, broken) = record::read(&world.history());
    assert!(broken <= 2 * world.killed.len(), "{broken} lines of the history are broken");
    let run = Run {
        limits,
        slots,
        names,
        guarded: replica::is_guarded,
        records,
        faults,
        killed: world.killed.clone(),
        hiccups: pulse.stop(),
        rows: world.rows(),
        leaked,
        healed,
        ended,
    };
    let verdict = checker::check(&run);
    println!("{}", kinds(&run));
    println!("{verdict}");
    if let (false, Ok(folder)) =
        (verdict.violations.is_empty(), std::env::var("LEASEHOLD_NEMESIS_KEEP"))
    {
        std::fs::copy(world.history(), format!("{folder}/history-{seed}")).unwrap();
        std::fs::write(format!("{folder}/faults-{seed}"), format!("{:#?}", run.faults)).unwrap();
        std::fs::write(format!("{folder}/server-{seed}"), world.server.log()).unwrap();
    }
    println!("replay: scripts/nemesis --seed {seed} --seconds {}", length.as_secs());
    verdict
}

fn limits(world: &mut World) -> Limits {
    let text = "SELECT current_setting('server_version_num')::int4";
    let version: i32 = world.server.client().query_one(text, &[]).unwrap().get(0);
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap();
    Limits {
        heartbeat: nanos(replica::HEARTBEAT),
        query: nanos(replica::QUERY),
        retry: nanos(replica::RETRY),
        ttl: nanos(replica::TTL),
        idle_limit: version >= 140_000,
    }
}

/// Does faults until `end`, then takes all of them away.
fn rage(world: &mut World, seed: u64, end: Instant) -> Vec<terms::Fault> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut active: Vec<Active> = Vec::new();
    let mut done = Vec::new();
    while Instant::now() < end {
        let plan = draw(&mut rng);
        let answers = !active.iter().any(Active::silences_server);
        let slot = world.target(&plan, answers);
        while active.len() >= AT_ONCE || active.iter().any(|one| one.excludes(&plan, slot)) {
            heal(world, &mut active, &mut done, Instant::now());
            std::thread::sleep(Duration::from_millis(2));
        }
        if std::env::var_os("LEASEHOLD_NEMESIS_LOUD").is_some() {
            println!("{} {plan:?} slot {slot}", record::now() / 1_000_000);
        }
        active.extend(world.inject(&plan, slot));
        let next = Instant::now() + plan.gap;
        while Instant::now() < next {
            heal(world, &mut active, &mut done, Instant::now());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    while let Some(last) = active.iter().map(|one| one.until).max() {
        heal(world, &mut active, &mut done, last);
    }
    done.sort_by_key(|fault| fault.begin);
    done
}

/// Takes away what is due by `now`.
fn heal(world: &mut World, active: &mut Vec<Active>, done: &mut Vec<terms::Fault>, now: Instant) {
    for mut one in std::mem::take(active) {
        if one.until <= now {
            world.heal(&mut one);
            done.push(one.fault);
        } else {
            active.push(one);
        }
    }
}

/// How often each fault was done.
fn kinds(run: &Run) -> String {
    let mut counts = std::collections::BTreeMap::<String, usize>::new();
    for fault in &run.faults {
        *counts.entry(format!("{:?}", fault.what)).or_default() += 1;
    }
    let counts: Vec<String> = counts.iter().map(|(what, n)| format!("{what} {n}")).collect();
    format!("faults: {} ({})", run.faults.len(), counts.join(", "))
}

/// Notes when this machine is late.
struct Pulse {
    end: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Vec<(u64, u64)>>,
}

impl Pulse {
    fn start() -> Pulse {
        let end = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&end);
        let thread = std::thread::spawn(move || {
            let mut hiccups = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let at = record::now();
                std::thread::sleep(PULSE);
                let late = (record::now() - at).saturating_sub(PULSE.as_nanos() as u64);
                if u128::from(late) > HICCUP.as_nanos() {
                    hiccups.push((at, late));
                }
            }
            hiccups
        });
        Pulse { end, thread }
    }

    fn stop(self) -> Vec<(u64, u64)> {
        self.end.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}
