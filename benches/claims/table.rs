//! One row per claim.

use std::time::Duration;

/// Sorted samples.
pub(crate) struct Samples(Vec<Duration>);

impl Samples {
    pub(crate) fn of(mut samples: Vec<Duration>) -> Samples {
        samples.sort();
        Samples(samples)
    }

    pub(crate) fn at(&self, part: f64) -> Duration {
        let last = self.0.len() - 1;
        self.0[(last as f64 * part).round() as usize]
    }

    pub(crate) fn median(&self) -> Duration {
        self.at(0.5)
    }
}

pub(crate) fn head() {
    println!(
        "{:<34}{:>6}{:>10}{:>10}{:>10}{:>12}{:>8}  must",
        "claim", "n", "min", "median", "p99", "yardstick", "ratio"
    );
}

fn short(duration: Duration) -> String {
    format!("{duration:.1?}")
}

/// Times of ours beside the yardstick's.
pub(crate) fn times(claim: &str, ours: &Samples, yardstick: &Samples, must: &str) {
    let ratio = ours.median().as_secs_f64() / yardstick.median().as_secs_f64();
    println!(
        "{claim:<34}{:>6}{:>10}{:>10}{:>10}{:>12}{ratio:>8.2}  {must}",
        ours.0.len(),
        short(ours.at(0.0)),
        short(ours.median()),
        short(ours.at(0.99)),
        short(yardstick.median()),
    );
}

/// Rates of ours beside the yardstick's, measured in turns: each pair of slices gives one ratio.
pub(crate) fn rates(claim: &str, slices: &[(f64, f64)], must: &str) {
    let mut ratios: Vec<f64> = slices.iter().map(|(ours, yardstick)| ours / yardstick).collect();
    ratios.sort_by(f64::total_cmp);
    let mean =
        |of: fn(&(f64, f64)) -> f64| slices.iter().map(of).sum::<f64>() / slices.len() as f64;
    println!(
        "{claim:<34}{:>6}{:>10}{:>10}{:>10}{:>12}{:>8.2}  {must}",
        slices.len(),
        "",
        format!("{:.0}/s", mean(|slice| slice.0)),
        "",
        format!("{:.0}/s", mean(|slice| slice.1)),
        ratios[ratios.len() / 2],
    );
}
