package sqlite

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

const (
	nodeAppID   = 0x50535452 // PSTR
	nodeVersion = 2          // of schema.sql
)

var nodeUpgrades = map[int]Fill{
	// Agents were not forgotten when they left, so all of them may be hosted. Timers by the wall clock go on at the
	// machine's pace: nobody noted which they were.
	1: with(FillClocks, Fill{"agent.hosted": "1", "seen.outcome": "iif(outcome = 'handed-over', outcome, NULL)"}),
}

// Node is the identity of a node's database.
type Node struct {
	Name     string // fixed for the life of the file
	Epoch    int64
	ClientID string // of the publishing relay
}

// NodeSchema is the kind of database that schema.sql, given as text, describes. node is the name that a new file gets.
func NodeSchema(text, node string, path string) Schema {
	return Schema{Name: "Postrider", AppID: nodeAppID, Version: nodeVersion, Text: text, Upgrades: nodeUpgrades, Locks: []string{".node", ".relay"}, Init: func(ctx context.Context, tx *Tx) error {
		real, err := realPath(path)
		if err != nil {
			return err
		}
		epoch, err := nextEpoch(real + ".epoch")
		if err != nil {
			return err
		}
		_, _, err = tx.Exec(ctx, `INSERT INTO meta (id, node, epoch, client_id, boot, clock_us, up_us, wall_us, steady_us, commit_seq)
			VALUES (1, ?, ?, ?, '', ?, 0, ?, ?, 0)`, node, epoch, "postrider-"+node+"-"+rand.Text()[:10], tx.NowUS, tx.WallUS, tx.SteadyUS)
		return err
	}}
}

// ReadNode reads the identity of an open node database.
func ReadNode(ctx context.Context, s *Store) (Node, error) {
	var n Node
	err := s.read.QueryRowContext(ctx, "SELECT node, epoch, client_id FROM meta WHERE id = 1").Scan(&n.Name, &n.Epoch, &n.ClientID)
	if err != nil {
		return Node{}, fmt.Errorf("read node of %s: %w", s.path, err)
	}
	return n, nil
}

// epochFile stands beside the database and outlives it, so that a later database of that name never reuses an epoch.
type epochFile struct {
	Epoch    int64  `json:"epoch"`
	Instance string `json:"instance"` // random; kept nowhere else, so that a copied database is told from its original
}

// nextEpoch gives a new database its epoch: above the file's and above the seconds since 1970.
func nextEpoch(path string) (int64, error) {
	var last epochFile
	b, err := os.ReadFile(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return 0, fmt.Errorf("read epoch file: %w", err)
	default:
		if err := json.Unmarshal(b, &last); err != nil {
			return 0, fmt.Errorf("read epoch file %s: %w", path, err)
		}
		if last.Epoch <= 0 || last.Epoch >= 1<<53 || last.Instance == "" {
			return 0, fmt.Errorf("read epoch file %s: no epoch and instance in it", path)
		}
	}
	next := epochFile{Epoch: max(last.Epoch, time.Now().Unix()) + 1, Instance: rand.Text()}
	if b, err = json.Marshal(next); err != nil {
		return 0, err
	}
	return next.Epoch, writeFile(path, append(b, '\n'))
}

// writeFile replaces path whole and durably, or not at all.
func writeFile(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
