//! The architecture's bold sentences, checked: which crate may depend on what, and that the core is
//! pure.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Every crate that `package` is built from.
fn tree(package: &str) -> Vec<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--package", package, "--edges", "normal", "--prefix", "none", "--format", "{p}", "--locked"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .filter_map(|l| l.split_whitespace().next().map(String::from))
        .collect()
}

#[test]
fn crates_depend_only_downwards() {
    let forbidden: [(&str, &[&str]); 5] = [
        ("leasehold-core", &["axum", "tokio", "lsm-tree", "redis", "rand", "getrandom", "leasehold-disk", "leasehold"]),
        ("leasehold-disk", &["axum", "redis", "leasehold"]),
        ("leasehold-redis", &["axum", "lsm-tree", "leasehold-disk", "leasehold"]),
        ("sim", &["axum", "lsm-tree", "leasehold-disk", "leasehold"]),
        ("harness", &["axum", "leasehold"]),
    ];
    for (package, forbidden) in forbidden {
        let tree = tree(package);
        assert!(tree.iter().any(|c| c == package), "{package} is not in its own tree: {tree:?}");
        for name in forbidden {
            assert!(!tree.iter().any(|c| c == name), "{package} must not depend on {name}");
        }
    }
}

fn sources(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push(path);
        }
    }
}

/// What a line of code says, without its comment.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

/// The words that would make the core impure, looked for in code up to the file's tests.
fn impure(text: &str) -> Vec<String> {
    const WORDS: [&str; 17] = [
        "std::time",
        "std::thread",
        "std::net",
        "std::fs",
        "std::env",
        "std::process",
        "std::sync",
        "Instant",
        "SystemTime",
        "HashMap",
        "HashSet",
        "getrandom",
        "thread_rng",
        "OsRng",
        "RandomState",
        "tokio",
        "println!",
    ];
    let production = text.split("#[cfg(test)]").next().unwrap_or_default();
    production
        .lines()
        .map(code)
        .filter(|l| {
            // A serializer has to say that it takes none.
            let refused = l.trim_start().starts_with("fn serialize_f") && l.contains("(self, _: f");
            let float = !refused && l.split(|c: char| !c.is_alphanumeric()).any(|w| w == "f64" || w == "f32");
            float || WORDS.iter().any(|w| l.contains(w))
        })
        .map(String::from)
        .collect()
}

#[test]
fn the_core_never_reads_a_clock_nor_draws_randomness_nor_stores_a_float() {
    let src = root().join("core/src");
    let lib = std::fs::read_to_string(src.join("lib.rs")).unwrap();
    assert!(lib.contains("#![no_std]"));
    let mut files = Vec::new();
    sources(&src, &mut files);
    assert!(files.len() > 20);
    for file in files {
        // The conformance suite is compiled for tests only.
        if file.components().any(|c| c.as_os_str().to_string_lossy().starts_with("conformance")) {
            continue;
        }
        let found = impure(&std::fs::read_to_string(&file).unwrap());
        assert!(found.is_empty(), "{}: {found:?}", file.display());
    }
}

#[test]
fn the_purity_check_finds_what_it_looks_for() {
    for line in
        ["use std::time::Instant;", "let x: f64 = 1.0;", "HashMap::new()", "std::thread::spawn(|| ())", "a: Vec<f32>,"]
    {
        assert_eq!(impure(line).len(), 1, "{line}");
    }
    for line in ["// no HashMap here", "let a = 0xf64;", "#[cfg(test)]\nuse std::thread;", "instant()"] {
        assert!(impure(line).is_empty(), "{line}");
    }
}

#[test]
fn the_store_port_knows_no_jobs() {
    for file in ["port.rs", "engine.rs", "index.rs", "books.rs"] {
        let text = std::fs::read_to_string(root().join("core/src/store").join(file)).unwrap();
        for line in text.lines().map(code) {
            assert!(!line.contains("crate::job") && !line.contains("JobId"), "{file}: {line}");
        }
    }
}
