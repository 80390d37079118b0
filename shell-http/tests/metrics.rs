//! Goal: what `/metrics` says can be parsed by the strictest reader, is documented, is bounded
//! whatever clients name, and is true. A real server; a parser that takes nothing else than the
//! format allows.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use support::{Client, Folder, Server, claim, submit};

type Labels = BTreeMap<String, String>;

/// A page as it was parsed: kinds by metric, values by sample.
#[derive(Debug, Default)]
struct Page {
    kinds: BTreeMap<String, String>,
    samples: BTreeMap<(String, Labels), f64>,
}

impl Page {
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        self.samples.get(&(name.to_owned(), labels)).copied()
    }

    fn one(&self, name: &str) -> f64 {
        self.value(name, &[]).unwrap_or_else(|| panic!("no {name}"))
    }
}

fn scrape(client: &mut Client) -> Page {
    let answer = client.get("/metrics");
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    parse(&String::from_utf8(answer.body).unwrap()).unwrap_or_else(|why| panic!("{why}"))
}

/// The text format, as its description has it and no more.
fn parse(text: &str) -> Result<Page, String> {
    let mut page = Page::default();
    let mut current: Option<(String, String)> = None;
    let mut helped = None;
    if !text.ends_with('\n') {
        return Err("the last line does not end".into());
    }
    for line in text.lines() {
        let bad = |why: &str| format!("{why}: {line}");
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').ok_or_else(|| bad("HELP without text"))?;
            if help.is_empty() || !is_name(name) {
                return Err(bad("HELP"));
            }
            helped = Some(name.to_owned());
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or_else(|| bad("TYPE without a kind"))?;
            if helped.take().as_deref() != Some(name) {
                return Err(bad("TYPE does not follow its HELP"));
            }
            if !["counter", "gauge", "histogram"].contains(&kind) {
                return Err(bad("kind"));
            }
            if (kind == "counter") != name.ends_with("_total") {
                return Err(bad("only counters end in _total"));
            }
            if page.kinds.insert(name.to_owned(), kind.to_owned()).is_some() {
                return Err(bad("begun twice"));
            }
            current = Some((name.to_owned(), kind.to_owned()));
        } else {
            let (name, labels, value) = sample(line).ok_or_else(|| bad("not a sample"))?;
            let (metric, kind) = current.as_ref().ok_or_else(|| bad("a sample before its TYPE"))?;
            let suffix = name.strip_prefix(metric.as_str()).ok_or_else(|| bad("not of the metric begun last"))?;
            let fits = match kind.as_str() {
                "histogram" => ["_bucket", "_sum", "_count"].contains(&suffix),
                _ => suffix.is_empty(),
            };
            if !fits || (suffix == "_bucket") != labels.contains_key("le") {
                return Err(bad("not a sample of its kind"));
            }
            if kind != "gauge" && (value.is_nan() || value < 0.0) {
                return Err(bad("negative"));
            }
            if page.samples.insert((name, labels), value).is_some() {
                return Err(bad("the same series twice"));
            }
        }
    }
    histograms_add_up(&page)?;
    Ok(page)
}

fn is_name(name: &str) -> bool {
    let first = name.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    first && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn sample(line: &str) -> Option<(String, Labels, f64)> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Labels::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (key, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            if !is_name(key) || labels.insert(key.to_owned(), value).is_some() {
                return None;
            }
            match after.split_at_checked(1)? {
                (",", after) => rest = after,
                ("}", after) => {
                    rest = after;
                    break;
                }
                _ => return None,
            }
        }
    }
    let value = rest.strip_prefix(' ')?;
    let value = if value == "+Inf" { f64::INFINITY } else { value.parse().ok()? };
    (is_name(name) && !rest.contains("  ")).then_some((name.to_owned(), labels, value))
}

/// Up to the closing quote, unescaped, and what follows it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut out = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((out, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => out.push('\n'),
                c @ ('\\' | '"') => out.push(c),
                _ => return None,
            },
            c => out.push(c),
        }
    }
    None
}

fn histograms_add_up(page: &Page) -> Result<(), String> {
    for metric in page.kinds.iter().filter(|(_, kind)| *kind == "histogram").map(|(name, _)| name) {
        let mut series: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
        for ((name, labels), value) in &page.samples {
            if *name == format!("{metric}_bucket") {
                let mut labels = labels.clone();
                let le = labels.remove("le").unwrap();
                let le =
                    if le == "+Inf" { f64::INFINITY } else { le.parse().map_err(|_| format!("{metric}: le {le}"))? };
                series.entry(labels).or_default().push((le, *value));
            }
        }
        for (labels, mut buckets) in series {
            buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            let count = page.samples.get(&(format!("{metric}_count"), labels.clone()));
            let sum = page.samples.get(&(format!("{metric}_sum"), labels.clone()));
            let grows = buckets.is_sorted_by(|a, b| a.1 <= b.1);
            let last = buckets.last().filter(|b| b.0 == f64::INFINITY).map(|b| b.1);
            if !grows || last.is_none() || last != count.copied() || sum.is_none() {
                return Err(format!("{metric}{labels:?}: {buckets:?}, count {count:?}, sum {sum:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn the_parser_takes_nothing_else() {
    let good = "# HELP a_total A.\n# TYPE a_total counter\na_total{x=\"\\\"}\\n\"} 1\n";
    assert!(parse(good).is_ok());
    for bad in [
        "a 1\n",
        "# HELP a A.\n# TYPE a counter\na 1\n",
        "# HELP a_total A.\n# TYPE a_total gauge\na_total 1\n",
        "# TYPE a gauge\na 1\n",
        "# HELP a A.\n# TYPE a gauge\na 1\na 2\n",
        "# HELP a A.\n# TYPE a gauge\na{x=\"\"\"} 1\n",
        "# HELP a A.\n# TYPE a gauge\na{x=\"1\",x=\"2\"} 1\n",
        "# HELP a A.\n# TYPE a gauge\nb 1\n",
        "# HELP a A.\n# TYPE a gauge\na 1",
        "# HELP a A.\n# TYPE a gauge\na one\n",
        "# HELP a A.\n# TYPE a histogram\na_bucket{le=\"1\"} 2\na_bucket{le=\"+Inf\"} 1\na_sum 1\na_count 1\n",
        "# HELP a A.\n# TYPE a histogram\na_bucket{le=\"1\"} 1\na_sum 1\na_count 1\n",
    ] {
        assert!(parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn the_page_is_sound_and_true() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let hostile = "we\\\\ird\\\"} 1 {";
    for queue in ["plain", "other", hostile] {
        submit(&mut c, &format!(r#"{{"queue":"{queue}","payload":1}}"#));
    }
    let (id, token) = claim(&mut c, "plain");
    assert_eq!(c.post(&format!("/v1/jobs/{id}/complete"), format!(r#"{{"token":"{token}"}}"#)).status, 200);
    assert_eq!(c.post("/v1/jobs", "{").status, 400);
    assert_eq!(c.get("/no/such/thing").status, 404);
    let page = scrape(&mut c);
    let route = |status| [("method", "POST"), ("route", "/v1/jobs"), ("status", status)];
    assert_eq!(page.value("leasehold_http_requests_total", &route("201")), Some(3.0));
    assert_eq!(page.value("leasehold_http_request_seconds_count", &route("2xx")), Some(3.0));
    assert_eq!(page.value("leasehold_http_request_seconds_count", &route("4xx")), Some(1.0));
    let jobs = |queue, status| {
        page.value("leasehold_queue_jobs", &[("queue", queue), ("class", "system"), ("status", status)])
    };
    assert_eq!(jobs("plain", "succeeded"), Some(1.0));
    assert_eq!(jobs("we\\ird\"} 1 {", "queued"), Some(1.0));
    assert_eq!((jobs("other", "queued"), page.one("leasehold_queues_omitted")), (Some(1.0), 1.0));
    assert_eq!(page.one("leasehold_jobs_submitted_total"), 3.0);
    assert_eq!((page.one("leasehold_queue_wait_seconds_count"), page.one("leasehold_run_seconds_count")), (1.0, 1.0));
    assert!(page.one("leasehold_run_seconds_sum") > 0.0);
    assert!(page.one("leasehold_store_commit_seconds_count") >= 5.0);
    assert_eq!(page.one("leasehold_store_commit_seconds_count"), page.one("leasehold_store_commits_total"));
    assert!(page.one("leasehold_store_commit_bytes_sum") > 100.0);
    assert_eq!(page.one("leasehold_breaker_open") + page.one("leasehold_store_poisoned"), 0.0);
    for positive in [
        "leasehold_process_resident_bytes",
        "leasehold_process_open_files",
        "leasehold_process_open_files_max",
        "leasehold_process_cpu_seconds_total",
        "leasehold_disk_free_bytes",
        "leasehold_disk_used_bytes",
    ] {
        assert!(page.one(positive) > 0.0, "{positive}");
    }
}

#[test]
fn what_is_exported_is_documented_and_the_other_way_round() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let exported: BTreeSet<String> = scrape(&mut server.client()).kinds.into_keys().collect();
    let manual = include_str!("../../docs/OPERATIONS.md");
    let section = manual.split("\n## ").find(|s| s.starts_with("Metrics\n")).unwrap();
    let documented: BTreeSet<String> = section
        .split('`')
        .skip(1)
        .step_by(2)
        .map(|code| code.split('{').next().unwrap())
        .filter(|name| name.starts_with("leasehold_"))
        .map(str::to_owned)
        .collect();
    let missing: Vec<_> = exported.difference(&documented).collect();
    let gone: Vec<_> = documented.difference(&exported).collect();
    assert!(missing.is_empty() && gone.is_empty(), "not documented: {missing:?}; not exported: {gone:?}");
}

#[test]
fn names_that_clients_make_do_not_grow_it_and_scraping_is_cheap() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    for batch in 0..3 {
        let jobs: Vec<String> = (0..100).map(|n| format!(r#"{{"queue":"queue-{batch}-{n}","payload":1}}"#)).collect();
        assert_eq!(c.post("/v1/jobs:batch", format!(r#"{{"jobs":[{}]}}"#, jobs.join(","))).status, 200);
    }
    let page = scrape(&mut c);
    let series = page.samples.keys().filter(|(name, _)| name == "leasehold_queue_jobs").count();
    assert_eq!((series, page.one("leasehold_queues_omitted")), (101, 200.0));
    let total: f64 = page.samples.iter().filter(|((name, _), _)| name == "leasehold_queue_jobs").map(|(_, v)| v).sum();
    assert_eq!(total, 300.0, "`other` holds the rest");
    // A hundred scrapes in a row may read the depths once a second, and nothing else of the store.
    let begun = std::time::Instant::now();
    let before = page.one("leasehold_store_read_seconds_count");
    let mut last = before;
    for _ in 0..100 {
        last = scrape(&mut c).one("leasehold_store_read_seconds_count");
    }
    let seconds = begun.elapsed().as_secs_f64();
    // For each look at 300 queues: their names, and 15 pages of 20. The sweeps read some, too.
    let allowed = (seconds + 2.0) * (20.0 + 10.0);
    assert!(last - before <= allowed, "{} reads in {seconds} s", last - before);
}
