"""The folder of fairseq's example, for its ``--user-dir``; its task and its model are part of the
package."""
