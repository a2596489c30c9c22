//! Synapse's configuration files, laid over each other: which files `-c` means, and which value of a key counts.
//!
//! The rules are Synapse's, so that the files an operator has keep their meaning: YAML as `PyYAML` reads it (`017` is octal,
//! `<<` merges), a folder stands for its `*.yaml` in name order, and of several files
//! the last one that has a top-level key gives the whole value of that key.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use serde_saphyr::{
    Error as YamlError, Options,
    options::{DuplicateKeyPolicy, NonFiniteFloatPolicy},
};

use super::{error::ConfigError, node::Node};

/// The files laid over each other.
pub(super) struct Layers {
    files: Vec<PathBuf>,
    keys: BTreeMap<String, (usize, Value)>,
    /// What is odd in the files, but not wrong.
    pub(super) warnings: Vec<String>,
}

impl Layers {
    /// Reads what the `-c` arguments `paths` mean.
    pub(super) fn read(paths: &[PathBuf]) -> Result<Self, ConfigError> {
        let layers = Self::read_if_any(paths)?;
        if layers.files.is_empty() {
            return Err(ConfigError::outside(
                "-c",
                "no configuration file is given",
                "Name the files that the Synapse worker was started with, for example \
                 `-c /etc/matrix-synapse/homeserver.yaml -c /etc/matrix-synapse/workers/fed1.yaml`",
            ));
        }
        Ok(layers)
    }

    /// The same, where there need be no file.
    pub(super) fn read_if_any(paths: &[PathBuf]) -> Result<Self, ConfigError> {
        let mut layers = Self {
            files: Vec::new(),
            keys: BTreeMap::new(),
            warnings: Vec::new(),
        };
        for path in paths {
            for file in files_of(path)? {
                layers.add(file)?;
            }
        }
        Ok(layers)
    }

    /// Each key's value that counts.
    pub(super) fn into_values(self) -> serde_json::Map<String, Value> {
        self.keys.into_iter().map(|(key, (_, value))| (key, value)).collect()
    }

    fn add(&mut self, file: PathBuf) -> Result<(), ConfigError> {
        let text = fs::read_to_string(&file).map_err(|e| unreadable(&file, &e))?;
        let index = self.files.len();
        match parse(&file, &text, &mut self.warnings)? {
            Value::Null => {}
            Value::Object(map) => self.keys.extend(map.into_iter().map(|(k, v)| (k, (index, v)))),
            _ => {
                return Err(ConfigError::in_file(
                    &file,
                    "the file does not consist of `key: value` lines",
                    "Name a configuration file of Synapse",
                ));
            }
        }
        self.files.push(file);
        Ok(())
    }

    /// The value of a top-level key.
    pub(super) fn get(&self, key: &str) -> Node<'_> {
        match self.keys.get(key) {
            Some((index, value)) => Node::new(self.files[*index].display().to_string(), key, Some(value)),
            None => Node::new(self.all_files(), key, None),
        }
    }

    /// The folder of the last file: where Synapse looks for what has no path of its own.
    pub(super) fn folder(&self) -> PathBuf {
        let folder = self
            .files
            .last()
            .and_then(|file| file.parent())
            .unwrap_or(Path::new(""));
        std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned())
    }

    fn all_files(&self) -> String {
        self.files
            .iter()
            .map(|f| f.display().to_string())
            .collect::<Vec<_>>()
            .join(", ")
    }
}

fn files_of(path: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = fs::read_dir(path).map_err(|e| unreadable(path, &e))?;
    let mut files = Vec::new();
    for entry in entries {
        let file = entry.map_err(|e| unreadable(path, &e))?.path();
        if file.is_file() && file.extension().is_some_and(|ext| ext == "yaml") {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

fn unreadable(file: &Path, error: &std::io::Error) -> ConfigError {
    ConfigError::in_file(
        file,
        format!("cannot be read: {error}"),
        "Check the path given with -c and that the user Burdock runs as may read it",
    )
}

fn parse(file: &Path, text: &str, warnings: &mut Vec<String>) -> Result<Value, ConfigError> {
    match serde_saphyr::from_str_with_options(text, options(DuplicateKeyPolicy::Error)) {
        // `PyYAML` lets the last one count and says nothing; refusing what Synapse runs with would help nobody.
        Err(YamlError::DuplicateMappingKey { key, location }) => {
            let key = key.unwrap_or_else(|| "a key".to_owned());
            warnings.push(format!(
                "{}: line {}: `{key}` is there twice; the last one counts",
                file.display(),
                location.line()
            ));
            serde_saphyr::from_str_with_options(text, options(DuplicateKeyPolicy::LastWins))
        }
        parsed => parsed,
    }
    .map_err(|e| malformed(file, &e))
}

fn options(duplicate_keys: DuplicateKeyPolicy) -> Options {
    serde_saphyr::options! {
        duplicate_keys: duplicate_keys,
        legacy_octal_numbers: true,
        strict_booleans: true, // else `y` and `n` are booleans as well; `Node::flag` knows the other words
        non_finite_float_policy: NonFiniteFloatPolicy::AsString,
        with_snippet: false, // a snippet could show the line with the password
    }
}

fn malformed(file: &Path, error: &YamlError) -> ConfigError {
    // Of all the texts only the scanner's are shown: they are fixed sentences and cannot quote a secret.
    let what = match error {
        YamlError::ExternalMessage { msg, .. } => format!(" ({msg})"),
        YamlError::Budget { .. } => " (it is too large or too deeply nested)".to_owned(),
        _ => String::new(),
    };
    let line = error.location().map_or(String::new(), |at| {
        format!("line {}, column {}: ", at.line(), at.column())
    });
    ConfigError::in_file(
        file,
        format!("{line}not valid YAML{what}"),
        "Correct the syntax there or just above it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            fs::write(folder.path().join(name), text).expect("a file");
        }
        folder
    }

    #[test]
    fn a_later_file_replaces_whole_top_level_keys() {
        let files = folder(&[
            ("a.yaml", "redis: {enabled: true, host: a}\nserver_name: x\n"),
            ("b.yaml", "redis: {port: 1}\n"),
        ]);
        let layers = Layers::read(&[files.path().join("a.yaml"), files.path().join("b.yaml")]).expect("layers");
        assert_eq!(layers.keys["redis"].1, serde_json::json!({"port": 1}));
        assert_eq!(layers.keys["server_name"].1, "x");
    }

    #[test]
    fn a_folder_means_its_yaml_files_in_name_order() {
        let files = folder(&[
            ("2.yaml", "k: two"),
            ("1.yaml", "k: one"),
            ("3.yml", "k: three"),
            ("4.yaml.bak", "k: four"),
        ]);
        let layers = Layers::read(&[files.path().to_owned()]).expect("layers");
        assert_eq!(layers.keys["k"].1, "two");
    }

    #[test]
    fn scalars_mean_what_they_mean_to_pyyaml() {
        let text = "a: yes\nb: off\nc: 0644\nd: 1_000\nbase: &b {x: 1, y: 2}\ne: {<<: *b, y: 3}\nf: '012'\ng:\nh: 1.5\ni: y\n3: 4\n";
        let files = folder(&[("a.yaml", text)]);
        let layers = Layers::read(&[files.path().to_owned()]).expect("layers");
        let value = |key: &str| layers.keys[key].1.clone();
        assert_eq!(layers.get("a").flag(), Ok(Some(true)));
        assert_eq!(layers.get("b").flag(), Ok(Some(false)));
        assert_eq!(value("i"), "y");
        assert_eq!(value("c"), 0o644);
        assert_eq!(value("d"), 1000);
        assert_eq!(value("e"), serde_json::json!({"x": 1, "y": 3}));
        assert_eq!(value("f"), "012");
        assert_eq!(value("g"), Value::Null);
        assert_eq!(value("h"), 1.5);
        assert_eq!(value("3"), 4);
    }

    #[test]
    fn of_a_key_given_twice_the_last_counts_and_is_warned_of() {
        let files = folder(&[("a.yaml", "k: 1\nother: 2\nk: 3\n")]);
        let layers = Layers::read(&[files.path().to_owned()]).expect("layers");
        assert_eq!(layers.keys["k"].1, 3);
        assert_eq!(layers.warnings.len(), 1);
        assert!(layers.warnings[0].contains("line 3: `k`"), "{}", layers.warnings[0]);
    }

    #[test]
    fn an_empty_file_says_nothing() {
        let files = folder(&[("a.yaml", "# nothing\n"), ("b.yaml", "k: 1")]);
        let layers = Layers::read(&[files.path().to_owned()]).expect("layers");
        assert_eq!(layers.keys.len(), 1);
    }
}
